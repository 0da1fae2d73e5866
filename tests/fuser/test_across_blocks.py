"""The first steps of a block in the graph of the block before it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernelwright.fuser import across_blocks, planning, running
from kernelwright.fuser.program import Program
from kernelwright.fuser.recorded_ops import LINEARS
from kernelwright.fuser.recording import record
from kernelwright.fuser.rewriting import join_products_of_one_input

from .blocks import drawn

WIDTH = 32


class Pair(nn.Module):
    """A block of text and image, joined for its products."""

    def __init__(self, joins_inside=False):
        super().__init__()
        self.joins_inside = joins_inside
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.image, self.text = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y, condition):
        condition = F.silu(condition)
        a, b = ((1 + m(condition))[:, None].chunk(2, -1) for m in (self.image, self.text))
        if self.joins_inside:
            z = torch.cat([y, x], 1)
            z = z + a[1] * self.proj(self.norm(z) * a[0] + b[0])
            return z[:, y.shape[1] :], z[:, : y.shape[1]]
        z = torch.cat([self.norm(y) * b[0], self.norm(x) * a[0]], 1)
        z = self.proj(z)
        return x + a[1] * z[:, y.shape[1] :], y + b[1] * z[:, : y.shape[1]]


def count(plan):
    return sum(isinstance(step, Program) for step in plan.steps)


# programs of a block alone, of the first with the work for the next, of the second after that
@pytest.mark.parametrize("joined", [False, True], ids=["two products", "one product"])
@pytest.mark.parametrize(
    ("joins_inside", "programs"), [(False, (5, 5, 2)), (True, (5, 5, 1))], ids=["apart", "together"]
)
@torch.no_grad()
def test_two_blocks(joins_inside, joined, programs):
    torch.manual_seed(0)
    first, second = Pair(joins_inside).eval(), Pair(joins_inside).eval()
    x, y, condition = (drawn(*s, dtype=torch.float32) for s in ((2, 6, 32), (2, 3, 32), (2, 32)))
    between = first(x, y, condition)
    expected = second(*between, condition)
    made = record(first, (x, y, condition), {}), record(second, (*between, condition), {})
    for recording in made:
        if joined:
            join_products_of_one_input(recording.graph, lambda nodes: True)
            assert recording.graph.find_nodes(op="call_function", target=LINEARS)
    plans = [planning.plan(recording) for recording in made]
    sources = (0, 1, 4)  # both results, and the condition, which is the third input
    head = across_blocks.head_of(made[1], plans[1], sources, 2)
    both = across_blocks.joined(made[0], made[1], head, sources)
    rest = across_blocks.rest_of(made[1], head)
    found = planning.plan(both.recording), planning.plan(rest)
    assert (count(plans[0]), count(found[0]), count(found[1])) == programs

    own = made[1].inputs(second, (*between, condition), {})
    weights = [own[i] for i in head.weights]
    given = made[0].inputs(first, (x, y, condition), {})
    at = len(made[0].weights)
    outputs = running.run(found[0], [*given[:at], *weights, *given[at:]])
    results, handed = outputs[: both.results], outputs[both.results :]
    assert all(map(torch.equal, results, between))
    known = [*results, x, y, condition]
    reads = [*weights, *(known[sources[i - len(made[1].weights)]] for i in head.given)]
    by_ops = across_blocks.by_ops(across_blocks.head_alone(made[1], head))(reads)
    assert all(map(torch.equal, handed, by_ops))
    assert all(map(torch.equal, running.run(found[1], [*own, *handed]), expected))


@torch.no_grad()
def test_a_block_that_is_given_something_else_has_no_head():
    block = Pair().eval()
    given = (drawn(*s, dtype=torch.float32) for s in ((2, 6, 32), (2, 3, 32), (2, 32)))
    made = record(block, tuple(given), {})
    plan = planning.plan(made)
    assert across_blocks.head_of(made, plan, (0, 1, None), 2) is None
    assert across_blocks.head_of(made, plan, (None, None, 4), 2) is None
    assert across_blocks.head_of(made, plan, (2, 3, 4), 2) is None  # nothing of the block before
