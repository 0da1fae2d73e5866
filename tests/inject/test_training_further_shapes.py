"""Training at ever new shapes, such as lengths of texts: no block is compared at a shape that does
not come often, and gradients stay eager's."""

import pytest
import torch
import torch.nn.functional as F
from everything import share

import kernelwright as kw
from inject.trained import WIDTH, Block, Model, data, differing, drawn, gradients, model, twice
from kernelwright.inject.training.block_programs import BoundBlock
from kernelwright.inject.training.blocks import WAITS, Training

# without reentry, with it, and none
CHECKPOINTING = [False, True, None]


@pytest.fixture
def compared(monkeypatch):
    """How many tokens blocks had when they were compared."""
    lengths, bind = [], Training._bind

    def counted(self, module, args, *others):
        lengths.append(args[0].shape[1])
        return bind(self, module, args, *others)

    monkeypatch.setattr(Training, "_bind", counted)
    return lengths


@pytest.fixture
def ran(monkeypatch):
    """A list with an entry for each block that ran as programs."""
    calls, run = [], BoundBlock.__call__
    monkeypatch.setattr(
        BoundBlock, "__call__", lambda self, *args: calls.append(self) or run(self, *args)
    )
    return calls


def of_length(length, seed=0):
    return {**data(seed), "x": drawn(2, length, 8, seed=seed)}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_lengths_that_come_once_are_not_compared(compared, checkpointing):
    eager, ours = twice(model())
    eager.checkpointing = ours.checkpointing = checkpointing
    report = kw.inject(ours)
    for length in (12, *range(13, 20)):
        expected = gradients(eager, of_length(length))
        assert differing(gradients(ours, of_length(length)), expected) == []
    assert set(compared) == {12}
    assert "2 modules ran as they are at a further shape" in " ".join(str(report).split())


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_length_that_comes_often_is_compared(compared, ran, checkpointing):
    eager, ours = twice(model())
    eager.checkpointing = ours.checkpointing = checkpointing
    report = kw.inject(ours)
    gradients(ours, of_length(12))
    expected = gradients(eager, of_length(9))
    for step in range(WAITS + 3):
        ran.clear()
        assert differing(gradients(ours, of_length(9)), expected) == []
        assert bool(ran) == (step >= WAITS)
    assert {9, 12} == set(compared)
    assert "further shape" not in str(report)


@pytest.mark.parametrize(
    ("checkpointing", "each"),
    [(way, each) for n, way in enumerate(CHECKPOINTING) for each in share([2, 3], 2, start=n)],
)
def test_several_forwards_before_a_backward(compared, checkpointing, each):
    """As of preferred and rejected answers. Checkpointing asks that a forward which it runs again
    saves what it has saved at first."""
    eager, ours = twice(model())
    eager.checkpointing = ours.checkpointing = checkpointing
    kw.inject(ours)
    gradients(ours, of_length(12))
    for _ in range(WAITS + 1):
        found = []
        for m in (eager, ours):
            m.zero_grad(set_to_none=True)
            sum(m(**of_length(9, seed)).square().mean() for seed in range(each)).backward()
            found.append({n: p.grad for n, p in m.named_parameters()})
        assert differing(*found) == []
    assert 9 in compared


class ScaledBlock(Block):
    def forward(self, x, text, time, by):
        x, text = super().forward(x, text, time)
        return F.silu(x) * by, text


class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(ScaledBlock() for _ in self.blocks)

    def forward(self, x, text, time, by):
        x = self.first(x)
        for block in self.blocks:
            x, text = block(x, text, time, by)
        return self.last(x)


def test_values_that_are_no_tensors_count(compared):
    eager, ours = twice(Scaled())
    kw.inject(ours)
    for by in range(1, 6):
        inputs = {**data(), "by": by}
        assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert len(compared) == 2


def test_another_layout_of_a_known_shape_is_compared_at_once(compared):
    eager, ours = twice(model())
    kw.inject(ours)
    gradients(ours, data())
    inputs = {**data(), "x": drawn(2, 8, 12).transpose(1, 2)}
    before = len(compared)
    inputs["text"] = drawn(2, WIDTH, 5).transpose(1, 2).requires_grad_()
    assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert len(compared) > before
