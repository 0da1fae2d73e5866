"""Linear layers of recorded blocks: when one of some tokens may be a part of that of all rows."""

import pytest
import torch
from torch import nn

from inject.harness import check_exact, check_fused
from kernelwright import models
from kernelwright.fuser import recording
from kernelwright.fuser.recorded_ops import LINEAR
from kernelwright.inject.reuse import programs
from kernelwright.inject.reuse.packed_gemm import SameBits
from kernelwright.inject.reuse.program_products import ProgramProducts


class OfAPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.out(x[:, :5]) * 2


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_in_exact_its_bits_are_compared_once_on_random_numbers(same, exact):
    block, x = OfAPart(), torch.randn(2, 9, 16)
    with torch.no_grad():
        made = recording.record(block, (x,), {})
    compared = []

    class Compares(SameBits):
        def __call__(self, way, x, sizes, bias, ours, eager):
            compared.append((x.shape, sizes))
            torch.testing.assert_close(ours(), eager())
            return same

    products = ProgramProducts(exact, None, Compares())
    (layer,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    state = torch.get_rng_state()
    found = products.whole(made, made.inputs(block, (x,), {}), layer, x, 0, 5)
    assert found == (same or not exact)
    assert compared == [((2, 9, 16), (0, 5, 16))] * exact
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_rows_are_copied_in_exact_if_all_that_pytorch_might_do_has_the_same_bits(same, exact):
    block, x = nn.Linear(16, 16, bias=False), torch.randn(2, 16, 9).transpose(1, 2)
    with torch.no_grad():
        made = recording.record(block, (x,), {})
    compared = []

    class Compares(SameBits):
        def __call__(self, way, x, sizes, bias, ours, eager):
            compared.append((x.stride(), sizes))
            (batched, copied), (one, two) = eager(), ours()
            torch.testing.assert_close(one, batched)
            assert torch.equal(two, copied)  # PyTorch copies for a weight that requires a gradient
            return same

    products = ProgramProducts(exact, None, Compares())
    (layer,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    given, state = made.inputs(block, (x,), {}), torch.get_rng_state()
    with torch.no_grad():
        assert products.copied(made, given, layer, False) == (same or not exact)
        block.requires_grad_(False)  # then PyTorch copies nothing
        assert not products.copied(made, given, layer, False)
    assert compared == [(x.stride(), (16,))] * exact
    assert torch.equal(torch.get_rng_state(), state)


def test_without_anything_to_compare_with_it_stays_apart():
    block, x = OfAPart(), torch.randn(2, 9, 16)
    with torch.no_grad():
        made = recording.record(block, (x,), {})
    (layer,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    given = made.inputs(block, (x,), {})
    assert not ProgramProducts(False, None, None).whole(made, given, layer, x, 0, 5)


@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_tokens_that_lie_across_are_multiplied_as_rows(numerics, monkeypatch):
    """As on a GPU: SANA keeps the layout of its first convolution through all blocks."""
    usual, changed = programs.Programs._planned, []

    def planned(self, device, kind, made):
        before = str(made.graph)
        programs.take_bias_out_of_products(made.graph)
        programs.copy_rows_of_products(made.graph, lambda *_: True)
        changed.append(str(made.graph) != before)
        return usual(self, device, kind, made)

    monkeypatch.setattr(programs.Programs, "_planned", planned)
    build = {"tiny": True, "dtype": torch.float32 if numerics == "exact" else torch.bfloat16}
    model = models.build("sana-1.6b", layers=1, **build)
    inputs = models.inputs("sana-1.6b", **build)
    if numerics == "exact":
        check_exact(model, inputs)
    else:
        check_fused(model, inputs)
    assert any(changed)


@pytest.mark.parametrize("numerics", ["exact", "fused"])
@pytest.mark.parametrize("preset", ["sd3.5-medium", "auraflow"])
def test_streams_of_a_batch_are_multiplied_together(preset, numerics, monkeypatch):
    """As on a GPU: the layers after joint attention, each of which takes a part of the tokens."""
    usual, changed = programs.Programs._planned, []

    def planned(self, device, kind, made):
        before = str(made.graph)
        programs.multiply_whole_rows(made.graph, lambda *given: True)
        changed.append(str(made.graph) != before)
        return usual(self, device, kind, made)

    monkeypatch.setattr(programs.Programs, "_planned", planned)
    build = {"tiny": True, "dtype": torch.float32 if numerics == "exact" else torch.bfloat16}
    model, inputs = models.build(preset, **build), models.inputs(preset, **build)
    if numerics == "exact":
        check_exact(model, inputs, recipes=False)
    else:
        check_fused(model, inputs, recipes=False)
    assert any(changed)
