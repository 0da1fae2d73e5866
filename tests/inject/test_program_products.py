"""Linear layers of recorded blocks: when one of some tokens may be a part of that of all rows."""

import pytest
import torch
from torch import nn

from kernelwright.fuser import recording
from kernelwright.fuser.recorded_ops import LINEAR
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


def test_without_anything_to_compare_with_it_stays_apart():
    block, x = OfAPart(), torch.randn(2, 9, 16)
    with torch.no_grad():
        made = recording.record(block, (x,), {})
    (layer,) = made.graph.find_nodes(op="call_function", target=LINEAR)
    given = made.inputs(block, (x,), {})
    assert not ProgramProducts(False, None, None).whole(made, given, layer, x, 0, 5)
