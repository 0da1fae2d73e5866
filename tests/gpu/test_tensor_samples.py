"""Samples are compared by a kernel on a GPU: it sees what PyTorch's ops see."""

import pytest
import torch
from inject.test_tensor_samples import TENSORS, notices_a_write
from torch.autograd import DeviceType

from kernelwright.inject.state.sample_comparison import SampleComparison, is_readable
from kernelwright.inject.state.tensor_samples import TensorSamples, sample_views


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_write_that_no_version_counts_is_noticed(name, whole):
    notices_a_write(TENSORS[name]().detach().cuda(), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("place", [(0, 0), (0, 2500), (2500, 0), (0, 1023), (1024, 0)])
def test_each_element_of_the_first_row_and_column_counts(dtype, place):
    weights = [torch.randn(3000, 2600, device="cuda").to(dtype) for _ in range(3)]
    samples = TensorSamples()
    for weight in weights:
        samples.note(weight)
    assert samples.check()()
    weights[1].data[1:, 1:] += 1
    assert samples.check()()
    weights[1].data[place] += 100
    assert not samples.check()()


def test_few_launches_compare_many_tensors():
    """One kernel for each element size, and the writing and reading of its flag."""
    tensors = [torch.randn(64, 64, device="cuda") for _ in range(300)]
    tensors += [t.bfloat16() for t in tensors]
    samples = TensorSamples()
    for tensor in tensors:
        samples.note(tensor)
    samples.check()()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert samples.check()()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]
    assert on_gpu.count("kernelwright_state") == 2
    assert len(on_gpu) < 10, on_gpu


def test_a_gpu_compares_what_lies_in_pinned_memory():
    weights = [torch.randn(3000, 2600).bfloat16().pin_memory() for _ in range(3)]
    views = sample_views(weights, sparse=True)
    assert all(is_readable(view, torch.device("cuda", 0)) for view in views)
    assert not is_readable(sample_views([torch.randn(8, 8)], sparse=True)[0], torch.device("cuda"))
    comparison = SampleComparison(views, [v.clone() for v in views], torch.device("cuda", 0))
    (unchanged,) = comparison()
    assert unchanged.is_cuda
    assert unchanged
    weights[1].data += 1
    assert not comparison()[0]
