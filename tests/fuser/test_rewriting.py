"""Graphs that are written differently before they are planned."""

import pytest
import torch
from torch import nn

from kernelwright.fuser import planning, recording, rewriting, running
from kernelwright.fuser.recording import LINEAR, LINEAR_GELU

aten = torch.ops.aten


class Convolved(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.conv(x))


class FeedForward(nn.Module):
    def __init__(self, approximate="tanh", bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=bias), nn.Linear(64, 16)
        self.act = nn.GELU(approximate=approximate)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def recorded(block, x):
    with torch.no_grad():
        return recording.record(block.eval(), (x,), {})


def result(made, block, x):
    with torch.no_grad():
        outputs = running.run(planning.plan(made), made.inputs(block, (x,), {}))
        return made.result(outputs), block(x)


@pytest.mark.parametrize("apart", [True, False])
def test_the_bias_of_a_convolution_goes_into_the_program_after_it(apart, monkeypatch):
    block, x = Convolved(), torch.randn(2, 8, 6, 6)
    monkeypatch.setattr(rewriting, "adds_bias_apart", lambda *_: apart)
    made = recorded(block, x)
    rewriting.take_bias_out_of_convolutions(made.graph)
    (node,) = made.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert (node.args[2] is None) == apart
    plan = planning.plan(made)
    assert len(plan.steps) == 2  # the convolution, and one program
    assert plan.ops == 1 + apart
    torch.testing.assert_close(*result(made, block, x))


def test_a_convolution_without_bias_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(rewriting, "adds_bias_apart", lambda *_: True)
    made = recorded(Convolved(bias=False), torch.randn(2, 8, 6, 6))
    before = str(made.graph)
    rewriting.take_bias_out_of_convolutions(made.graph)
    assert str(made.graph) == before


def targets(made):
    return [n.target for n in made.graph.find_nodes(op="call_function", target=LINEAR)], [
        n.target for n in made.graph.find_nodes(op="call_function", target=LINEAR_GELU)
    ]


def test_gelu_goes_into_the_product_before_it():
    block, x = FeedForward(), torch.randn(4, 16)
    made = recorded(block, x)
    rewriting.take_gelu_into_products(made.graph)
    assert targets(made) == ([LINEAR], [LINEAR_GELU])
    got, want = result(made, block, x)
    assert torch.equal(got, want)  # without the epilogue it is both ops, one after the other


@pytest.mark.parametrize("other", [{"approximate": "none"}, {"bias": False}], ids=str)
def test_a_gelu_that_cublas_does_not_have_stays_as_it_is(other):
    made = recorded(FeedForward(**other), torch.randn(4, 16))
    rewriting.take_gelu_into_products(made.graph)
    assert targets(made) == ([LINEAR, LINEAR], [])
