"""Graphs of forwards that read values on the host: captured with them, and refused with others."""

import pytest
import torch
from torch import nn

from .stand_in import alignment_of_new_memory, called  # noqa: F401
from .tape import TapeGraphs


class Reads(nn.Module):
    """Different ways to read a mask on the host."""

    def __init__(self, how):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.how = how

    def forward(self, x, mask):
        rows = self.how(self.proj(x).reshape(-1, 8), mask.reshape(-1))
        return rows * 2


WAYS = {
    "item": lambda rows, mask: rows * mask.sum().item(),
    "branch": lambda rows, mask: rows + 1 if mask.any() else rows,
    "choose": lambda rows, mask: rows[mask],
    "write": lambda rows, mask: rows.index_put((mask,), rows[mask] * 3),
    "nonzero": lambda rows, mask: rows[mask.nonzero().squeeze(1)],
    "two": lambda rows, mask: rows[mask][: int(mask.sum()) - 1],
}


def masks():
    first = torch.zeros(2, 3, dtype=torch.bool)
    first[0, :2] = first[1, 0] = True
    return first, first.flip(1)


@pytest.fixture(params=list(WAYS))
def reads(request):
    torch.manual_seed(0)
    return Reads(WAYS[request.param]).eval()


@torch.no_grad()
def test_a_forward_that_reads_the_same_values_is_replayed(reads):
    graphs, (mask, _) = TapeGraphs(), masks()
    for _ in range(4):
        x = torch.randn(2, 3, 8)
        assert torch.equal(called(graphs, reads, x, mask.clone()), reads(x, mask))
    assert graphs.captured == 1
    assert not graphs.reasons


@torch.no_grad()
def test_other_values_run_without_the_graph(reads):
    graphs, (mask, other) = TapeGraphs(), masks()
    other[1, 1] = not other[1, 1]
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        called(graphs, reads, x, mask)
    assert graphs.captured == 1
    got = called(graphs, reads, x, other)
    assert torch.equal(got, reads(x, other))
    assert torch.equal(called(graphs, reads, x, mask), reads(x, mask))


class Table(nn.Module):
    """A table of the host, read by its size."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.table = torch.arange(48.0).reshape(6, 8)

    def forward(self, x, mask):
        return self.proj(x) + self.table[: int(mask.sum())].sum(0)


@torch.no_grad()
def test_a_table_of_the_host_that_is_written_to():
    module, graphs, (mask, _) = Table().eval(), TapeGraphs(), masks()
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        called(graphs, module, x, mask)
    assert graphs.captured == 1
    module.table.mul_(2)
    assert torch.equal(called(graphs, module, x, mask), module(x, mask))
