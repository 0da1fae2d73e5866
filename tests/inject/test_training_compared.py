"""What the first call of a block under autograd finds out: programs that differ from eager run as
PyTorch's ops, and attention that does not repeat itself keeps nothing else from being compared."""

import sys

import pytest
import torch
import torch.nn.functional as F

import kernelwright as kw
from inject.trained import Attention, data, differing, gradients, model, twice, with_lora
from kernelwright.inject.reuse.program_sites import ProgramSites
from kernelwright.inject.training import blocks
from kernelwright.inject.training.block_programs import BlockPrograms
from kernelwright.inject.training.trial import Trial


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_program_that_differs_runs_as_ops(monkeypatch, half):
    wrong, usual = f"program 2 of Block's {half}", ProgramSites._kernel

    def kernel(self, program, given, outputs):
        usual(self, program, given, outputs)
        if self.names[id(program)] == wrong:
            for result in outputs.values():
                result.mul_(1.01)

    monkeypatch.setattr(ProgramSites, "_kernel", kernel)
    eager, ours = twice(model())
    report = kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, data()), gradients(eager, data())) == []
    assert any(f"{wrong} differs from eager's" in line for line in report.gradients)


def test_a_backward_that_differs_in_every_way_is_not_used(monkeypatch):
    usual = BlockPrograms.run_backward

    def backward(self, *given):
        return [t * 1.01 for t in usual(self, *given)]

    monkeypatch.setattr(BlockPrograms, "run_backward", backward)
    eager, ours = twice(model())
    report = kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, data()), gradients(eager, data())) == []
    assert any("a gradient differs from eager's" in line for line in report.gradients)


calls, orders = [0], [0]  # how often attention was differentiated, and after how many it repeats


@torch.library.custom_op("training_test::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@torch.library.custom_op("training_test::attention_backward", mutates_args=())
def attention_backward(g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sums in another order each time, as far as anybody can tell."""
    calls[0] += 1
    order = calls[0] % orders[0] if orders[0] else calls[0]
    return g.mean(2, keepdim=True).expand(v.shape) + order * 1e-3


attention.register_fake(lambda q, k, v: torch.empty_like(q))
attention_backward.register_fake(lambda g, v: torch.empty_like(v))
attention.register_autograd(
    lambda ctx, g: (None, None, attention_backward(g, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]),
)


@pytest.fixture
def attends(monkeypatch):
    """Blocks run `attention`, whose gradients repeat after so many runs."""

    def forward(self, x, text):
        heads = [
            layer(t).unflatten(-1, (2, -1)).transpose(1, 2).contiguous()
            for layer, t in ((self.q, x), (self.k, text), (self.v, text))
        ]
        return self.o(attention(*heads).transpose(1, 2).flatten(2))

    def repeating(after):
        monkeypatch.setattr(Attention, "forward", forward)
        monkeypatch.setattr(sys.modules[__name__], "orders", [after])

    return repeating


@pytest.mark.parametrize("after", [0, 2, 3], ids=["never", "two", "three"])
def test_attention_that_does_not_repeat_itself(attends, after):
    """Nor does one that by chance gives autograd the same bits twice, and others to programs."""
    attends(after)
    ours = model()
    report = kw.inject(ours)
    first, second = gradients(ours, data()), gradients(ours, data())
    assert after or differing(first, second) != []
    lines = [line for line in report.gradients if line.startswith("Block")]
    assert lines
    assert all("recorded: forward" in line for line in lines)


def test_gradients_that_do_not_depend_on_such_attention_are_autograds(attends, monkeypatch):
    attends(0)
    usual = Trial._by_ops

    def by_ops(self, joint):
        found, known = usual(self, joint)
        found.contributions[:] = [(name, t * 1.01) for name, t in found.contributions]
        return found, known

    monkeypatch.setattr(Trial, "_by_ops", by_ops)
    ours = model()
    report = kw.inject(ours)
    gradients(ours, data())
    lines = [line for line in report.gradients if line.startswith("Block")]
    assert lines
    assert all("of the ops that autograd runs differs" in line for line in lines)


def test_blocks_with_adapters_share_recordings(monkeypatch):
    """peft keeps the name of each layer in it; the first block has an input without a gradient."""
    pytest.importorskip("peft")
    recorded, usual = [], blocks.record_joint
    monkeypatch.setattr(blocks, "record_joint", lambda *a: (recorded.append(1), usual(*a))[1])
    eager, ours = twice(with_lora(model(layers=4), "q", "v", "up"))
    kw.inject(ours)
    inputs = {name: t.detach() for name, t in data().items()}
    for _ in range(2):
        assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert len(recorded) == 2
