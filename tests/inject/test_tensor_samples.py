"""Samples notice that a tensor was written to behind PyTorch's back, and keep no memory alive."""

from weakref import ref

import pytest
import torch
from torch import nn

from kernelwright.inject.state import tensor_samples
from kernelwright.inject.state.tensor_samples import TensorSamples

TENSORS = {
    "a matrix": lambda: nn.Parameter(torch.randn(4, 6)),
    "a vector": lambda: nn.Parameter(torch.randn(6)),
    "a number": lambda: torch.tensor(2.0),
    "a convolution": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "bytes": lambda: torch.arange(8, dtype=torch.uint8),
    "complex numbers": lambda: torch.randn(4, 2, dtype=torch.complex64),
    "half of a tensor": lambda: torch.randn(8, 6)[4:],
    "a transposed one": lambda: torch.randn(6, 4).t(),
}


def noted(tensor, whole=False):
    samples = TensorSamples()
    samples.note(tensor, whole)
    return samples


def notices_a_write(tensor, whole):
    samples = noted(tensor, whole)
    assert samples.check()()
    assert samples.check()()
    tensor.data.view(-1)[:1].add_(1) if tensor.is_contiguous() else tensor.data.add_(1)
    assert not samples.check()()
    samples.forget()
    assert samples.check()()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_write_that_no_version_counts_is_noticed(name, whole):
    notices_a_write(TENSORS[name](), whole)


def test_all_of_a_prompt_is_compared():
    text = torch.randn(2, 5, 4)[:, 1:]
    samples = noted(text, whole=True)
    text.data[1, 3, 2] += 1
    assert not samples.check()()


def test_a_comparison_keeps_no_storage_alive():
    tensor = torch.randn(4, 6)
    samples, storage = noted(tensor), ref(tensor.untyped_storage())
    assert samples.check()()
    del tensor
    assert storage() is None
    assert len(samples) == 0
    assert samples.check()()


def test_a_storage_that_is_emptied_and_filled_again_is_followed():
    """FSDP frees weights between forwards, and gathers them into the same storage."""
    tensor = torch.randn(4, 6)
    samples, storage, size = noted(tensor), tensor.untyped_storage(), tensor.nbytes
    values = tensor.clone()
    assert samples.check()()
    storage.resize_(0)
    assert samples.check()()
    keep = torch.empty(1 << 10)  # another allocation, so that the memory is likely another
    storage.resize_(size)
    tensor.data.copy_(values)
    assert samples.check()()
    tensor.data.zero_()
    assert not samples.check()()
    del keep


def test_samples_are_compared_in_inference_mode_and_outside():
    tensor = torch.randn(4, 6)
    samples = noted(tensor)
    with torch.inference_mode():
        assert samples.check()()
    assert samples.check()()
    with torch.inference_mode():
        tensor.data[0, 0] += 1
        assert not samples.check()()


def test_a_check_is_made_ready_ahead(monkeypatch):
    def made(*given, own=tensor_samples._Comparison):
        built.append(given)
        return own(*given)

    built = []
    monkeypatch.setattr(tensor_samples, "_Comparison", made)
    first, second = torch.randn(4), torch.randn(4)
    samples = noted(first)
    before = len(built)
    samples.prepare()
    samples.prepare()
    assert len(built) == before + 1
    assert samples.check()()
    assert len(built) == before + 1
    samples.note(second)
    samples.prepare()
    second.data.add_(1)
    assert not samples.check()()
    assert len(built) == before + 2
