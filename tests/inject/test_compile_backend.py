"""torch.compile(model, backend="kernelwright"): the bits of eager, through Dynamo."""

import pytest
import torch
from fuser.blocks import Block, drawn
from torch import nn

from kernelwright import models
from kernelwright.inject import compile_backend


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(tokens):
    table = drawn(tokens, 32, dtype=torch.float32)
    return (
        drawn(2, tokens, 64, dtype=torch.float32),
        drawn(2, 64, dtype=torch.float32),
        table,
        table,
    )


@pytest.fixture
def recorded(monkeypatch):
    """How many graphs were recorded."""
    made, own = [], compile_backend.Programs.recorded

    def noted(self, *args):
        made.append(own(self, *args))
        return made[-1]

    monkeypatch.setattr(compile_backend.Programs, "recorded", noted)
    return made


def test_it_is_found_by_its_name():
    assert "kernelwright" in torch._dynamo.list_backends()


@torch.no_grad()
def test_a_module_of_no_library_has_the_bits_of_eager(recorded):
    model = Block().eval()
    compiled = torch.compile(model, backend="kernelwright")
    for tokens in (24, 24, 20, 24):
        given = inputs(tokens)
        assert torch.equal(compiled(*given), model(*given))
    assert len(recorded) == 3  # at the second size Dynamo makes a graph for any, recorded for each
    assert all(found.kernels < found.plan.ops for found in recorded)


@pytest.mark.compatibility("the torch.compile backend of kernelwright")
@torch.no_grad()
def test_a_model_of_diffusers(recorded):
    how = {"tiny": True, "dtype": torch.float32, "device": "cpu"}
    model, given = models.build("flux2-dev", **how, layers=1), models.inputs("flux2-dev", **how)
    compiled = torch.compile(model, backend="kernelwright")
    for _ in range(2):
        assert torch.equal(compiled(**given)[0], model(**given)[0])
    assert recorded


def test_gradients_are_eagers():
    model = Block().eval()
    given = inputs(8)
    model(*given).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="kernelwright")(*given).sum().backward()
    assert all(map(torch.equal, expected, (p.grad for p in model.parameters())))


class Draws(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_is(recorded):
    x = drawn(4, 8, dtype=torch.float32)
    compiled = torch.compile(Draws(), backend="kernelwright")
    for _ in range(3):
        torch.manual_seed(3)
        got = compiled(x)
        torch.manual_seed(3)
        assert torch.equal(got, Draws()(x))
    assert all(isinstance(found, str) for found in recorded)


@torch.no_grad()
def test_weights_that_change_are_read_anew():
    model = Block().eval()
    compiled, given = torch.compile(model, backend="kernelwright"), inputs(8)
    compiled(*given)
    for p in model.parameters():
        p.mul_(1.25)
    assert torch.equal(compiled(*given), model(*given))
