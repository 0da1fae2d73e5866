"""While gradients are recorded, an injected model has eager's loss and eager's gradients, bit for
bit, and its blocks run as programs, with what is kept for the backward not above eager's."""

from weakref import ref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import kernelwright as kw
from inject.trained import (
    WIDTH,
    Block,
    Model,
    data,
    differing,
    drawn,
    gradients,
    model,
    preset,
    steps,
    twice,
    with_lora,
)
from inject.training_graphs import UnkindGraphs
from inject.training_scenarios import same_gradients
from kernelwright import models
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.reuse.program_sites import ProgramSites
from kernelwright.inject.training.block_programs import BlockPrograms
from kernelwright.inject.training.blocks import Training

PROGRAMS = "Block, while gradients are recorded: forward"


def runs_as_programs(report):
    return any(PROGRAMS in line for line in report.gradients)


def check(trained, inputs, calls=3, **how):
    """Hold an injected copy against eager's gradients, at first sight and after it."""
    eager, ours = twice(trained)
    report = kw.inject(ours, **how)
    expected = gradients(eager, inputs)
    for _ in range(calls):
        assert differing(gradients(ours, inputs), expected) == []
    return report


@pytest.mark.compatibility("training of all weights")
@pytest.mark.parametrize(
    ("numerics", "dtype"),
    [("exact", torch.float32), ("exact", torch.bfloat16), ("fused", torch.float32)],
)
def test_gradients_are_eagers(numerics, dtype):
    report = check(model().to(dtype), data(dtype=dtype), numerics=numerics)
    lines = [line for line in report.gradients if "Block" in line]
    # of the last block's text nobody wants a gradient: it is prepared twice
    assert len(lines) == 2
    assert all(PROGRAMS in line for line in lines)


@pytest.mark.compatibility("training of LoRA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_trained_and_nothing_else(dtype):
    eager, ours = twice(with_lora(model().to(dtype), "q", "k", "v", "o"))
    inputs = {n: t.detach() for n, t in data(dtype=dtype).items()}
    report = kw.inject(ours)
    assert torch.equal(steps(ours, inputs, 20), steps(eager, inputs, 20))
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert runs_as_programs(report)


def test_twenty_steps_end_in_the_same_weights():
    eager, ours = twice(model())
    report = kw.inject(ours)
    assert torch.equal(steps(ours, data(), 20), steps(eager, data(), 20))
    assert differing(ours.state_dict(), eager.state_dict()) == []
    assert runs_as_programs(report)


def test_only_some_weights_are_trained():
    trained = model().requires_grad_(False)
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name.endswith("q.bias"))
    inputs = {n: t.detach() for n, t in data().items()}
    eager, ours = twice(trained)
    kw.inject(ours)
    assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    for m in (eager, ours):
        m.blocks[1].up.requires_grad_(True)
    assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []


def test_gradients_are_added_to_those_that_are_there():
    eager, ours = twice(model())
    kw.inject(ours)
    for m in (eager, ours):
        for seed in range(3):
            m(**data(seed)).square().mean().backward()
    pairs = zip(eager.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.compatibility("gradient checkpointing")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    trained = model()
    trained.checkpointing = reentrant
    assert runs_as_programs(check(trained, data()))


def test_a_gradient_of_another_layout():
    """The last block's result is summed: its gradient is one number, repeated."""
    eager, ours = twice(model())
    for m in (eager, ours):
        m.last = torch.nn.Identity()
    report = kw.inject(ours)
    for loss in [torch.sum, torch.sum, lambda y: y.transpose(1, 2).contiguous().square().sum()] * 2:
        expected = gradients(eager, data(), loss)
        assert differing(gradients(ours, data(), loss), expected) == []
    assert runs_as_programs(report)


@pytest.mark.parametrize("checkpointing", [False, None])
def test_gradients_whose_layout_always_changes_are_left_to_eager(checkpointing):
    eager, ours = twice(model(layers=1))
    for m in (eager, ours):
        m.last, m.checkpointing = torch.nn.Identity(), checkpointing
    report = kw.inject(ours)
    for step in range(12):
        weight = drawn(2, 12, 32) if step % 2 else drawn(2, 32, 12).transpose(1, 2)

        def loss(y, weight=weight):
            return (y * weight).sum()

        expected = gradients(eager, data(), loss)
        assert differing(gradients(ours, data(), loss), expected) == []
    assert any("gradients of another layout" in line for line in report.gradients)


@pytest.mark.parametrize("layouts", ["same", "changing"])
def test_two_checkpointed_forwards_whose_gradients_have_another_layout(layouts):
    """How a block runs changes between steps, not between forwards of which one will run again."""
    eager, ours = twice(model())
    for m in (eager, ours):
        m.last, m.checkpointing = torch.nn.Identity(), False
    report = kw.inject(ours)
    across = drawn(2, 32, 12).transpose(1, 2)
    for step in range(8):
        weights = (across, drawn(2, 12, 32) if layouts == "changing" and step % 2 else across)

        def run(m, weights=weights):
            results = [m(**data(seed)) for seed in (0, 1)]
            sum((y * w).sum() for y, w in zip(results, weights, strict=True)).backward()

        same_gradients(eager, ours, run)
    assert len([line for line in report.gradients if PROGRAMS in line]) >= 3
    left = any("gradients of another layout" in line for line in report.gradients)
    assert left == (layouts == "changing")


class BlockOfText(Block):
    def __init__(self):
        super().__init__()
        self.text = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, text, time):
        x, text = super().forward(x, text, time)
        return x, text + torch.nn.functional.silu(self.text(text)) * 0.5


class WithAuxiliary(Model):
    """Returns the text too if that is wanted, which has weights that nothing else reads."""

    def __init__(self):
        super().__init__()
        self.both = False
        self.blocks = torch.nn.ModuleList(BlockOfText() for _ in self.blocks)

    def forward(self, x, text, time):
        x = self.first(x)
        for block in self.blocks:
            x, text = block(x, text, time)
        return torch.cat([self.last(x), text[..., :8]], 1) if self.both else self.last(x)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_result_that_some_losses_read_and_others_do_not(graphs, monkeypatch):
    """A weight that only this result needs has a gradient in some steps, and contributions of more
    results are added to what the text of the block before gets, in autograd's order."""
    monkeypatch.setattr(graphs_module, "Graphs", UnkindGraphs)
    torch.manual_seed(0)
    eager, ours = twice(WithAuxiliary())
    report = kw.inject(ours, graphs=graphs)
    for both in (False, False, True, True, False, True, False, False):
        eager.both = ours.both = both
        assert differing(gradients(ours, data()), gradients(eager, data())) == []
    assert any("BlockOfText" in line and ": forward" in line for line in report.gradients)


def kept_bytes(trained, inputs):
    """What autograd saves in a forward, weights and inputs aside."""
    own = {t.untyped_storage().data_ptr() for t in (*trained.parameters(), *inputs.values())}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        result = trained(**inputs)
    del result
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("adapted", [False, True])
def test_no_more_is_kept_for_the_backward_than_by_eager(adapted):
    trained = with_lora(model(), "q", "k", "v", "o") if adapted else model()
    eager, ours = twice(trained)
    kw.inject(ours)
    for _ in range(2):  # the last block is prepared for its gradients after the first
        gradients(ours, data())
    assert kept_bytes(ours, data()) < kept_bytes(eager, data())


def test_dropout_draws_what_it_draws_in_eager():
    eager, ours = twice(model(dropout=0.5).train())
    report = kw.inject(ours)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = gradients(eager, data())
        torch.manual_seed(seed)
        assert differing(gradients(ours, data()), expected) == []
    assert any("random numbers" in line for line in report.gradients)


@pytest.mark.compatibility("autocast")
def test_autocast_runs_as_without_injection():
    eager, ours = twice(model())
    report = kw.inject(ours)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(eager, data())
        assert differing(gradients(ours, data()), expected) == []
    assert any("autocast" in line for line in report.gradients)
    assert differing(gradients(ours, data()), gradients(eager, data())) == []


def test_second_derivatives_are_refused_by_name():
    ours = model()
    kw.inject(ours)
    (first,) = torch.autograd.grad(ours(**data()).square().sum(), ours.first.weight)
    assert first.abs().sum() > 0
    with pytest.raises(RuntimeError, match="Block runs as kernels that have no second derivative"):
        torch.autograd.grad(ours(**data()).square().sum(), ours.first.weight, create_graph=True)


def test_what_is_changed_between_steps_is_followed():
    eager, ours = twice(with_lora(model(), "q", "up", init_lora_weights=False))
    kw.inject(ours)
    inputs = {n: t.detach() for n, t in data().items()}

    def changes():
        yield lambda m: None
        yield lambda m: setattr(m.blocks[1], "factor", 0.5)
        yield lambda m: m.blocks[0].up.scaling.update(default=3.0)
        yield lambda m: m.blocks[1].attention.q.enable_adapters(False)
        yield lambda m: setattr(m.blocks[0].norm2, "eps", 0.5)
        yield lambda m: m.blocks[1].up.register_forward_hook(lambda *given: given[-1] * 2)
        yield lambda m: m.blocks[0].requires_grad_(True)

    for change in changes():
        change(eager), change(ours)
        for _ in range(2):
            assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []


def test_another_setting_of_a_switch_is_compared_again(monkeypatch):
    """A switch may choose other kernels, for which nothing was compared."""
    bound, usual = [], Training._bind
    monkeypatch.setattr(Training, "_bind", lambda *given: bound.append(1) or usual(*given))
    ours = model()
    kw.inject(ours)
    counts = []
    usually = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    for allowed in (usually, usually, usually, not usually, usually):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
        gradients(ours, data())
        counts.append(len(bound))
    assert counts[1] == counts[2] < counts[3] == counts[4]


def test_hooks_of_inner_modules_run():
    eager, ours = twice(model())
    kw.inject(ours)
    gradients(ours, data())
    counts = []
    for m in (eager, ours):
        count = []
        for inner in m.modules():
            inner.register_full_backward_hook(lambda *_, count=count: count.append(1))
        gradients(m, data())
        counts.append(len(count))
    assert counts[0] == counts[1] > 0


def test_inference_between_steps_is_as_before():
    eager, ours = twice(model())
    kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, data()), gradients(eager, data())) == []
        with torch.no_grad():
            assert torch.equal(ours(**data()), eager(**data()))


def test_a_weight_written_to_before_the_backward_raises_as_in_eager():
    ours = model()
    kw.inject(ours)
    gradients(ours, data())
    loss = ours(**data()).square().mean()
    with torch.no_grad():
        ours.blocks[1].down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_do_not_go_through_the_hooks_of_autograd():
    """A block has dozens, and those of checkpointing take Python some microseconds each."""
    ours = model()
    kw.inject(ours)
    gradients(ours, data())
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = ours(**data()).square().mean()
    addresses = {t.data_ptr() for t in saved}
    assert saved
    assert not any(p.data_ptr() in addresses for p in ours.blocks.parameters())
    loss.backward()


def test_a_second_backward_of_one_forward():
    eager, ours = twice(model())
    kw.inject(ours)
    found = []
    for m in (eager, ours):
        m.zero_grad()
        loss = m(**data()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({n: p.grad for n, p in m.named_parameters() if p.grad is not None})
    assert differing(*found) == []


CASES = [
    ("ltx-video", True, torch.float32),
    ("flux-dev", False, torch.float32),
    ("qwen-image", True, torch.float32),
    ("llama-3-8b", False, torch.bfloat16),
]


@pytest.mark.parametrize(("name", "lora", "dtype"), CASES)
def test_models(name, lora, dtype):
    eager, ours = twice(preset(name, lora, dtype))
    inputs = models.inputs(name, tiny=True, dtype=dtype)
    report = kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert any("backward" in line and "kernels" in line for line in report.gradients), report


@pytest.mark.compatibility("gradient checkpointing")
def test_checkpointing_of_transformers():
    """Its layers are checkpointed by what calls their forward."""
    name = "llama-3-8b"
    trained = models.build(name, tiny=True, dtype=torch.float32).requires_grad_(True).train()
    trained.gradient_checkpointing_enable()
    eager, ours = twice(trained)
    inputs = models.inputs(name, tiny=True, dtype=torch.float32)
    report = kw.inject(ours)
    for _ in range(2):
        assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert any("backward" in line and "kernels" in line for line in report.gradients), report


@pytest.mark.compatibility("training of DoRA")
def test_adapters_that_scale_the_weight_itself():
    """DoRA: the norm of each row of a weight is trained as well."""
    trained = with_lora(model(), "q", "up", use_dora=True, init_lora_weights=False)
    inputs = {n: t.detach() for n, t in data().items()}
    assert runs_as_programs(check(trained, inputs))


def test_a_part_that_is_skipped_keeps_its_block_as_it_is():
    report = check(model(), data(), calls=1, skip="Attention")
    assert not runs_as_programs(report)


def test_an_input_of_inference_mode_is_left_to_eager():
    """Autograd may not keep it, and eager does not need to: what reads it is frozen."""
    eager, ours = twice(model())
    for m in (eager, ours):
        m.requires_grad_(False)
        for block in m.blocks:
            block.down.requires_grad_(True)
    report = kw.inject(ours)
    usual = {name: t.detach() for name, t in data().items()}
    with torch.inference_mode():
        made = {name: t.clone() for name, t in usual.items()}
    for inputs in (usual, {**usual, "text": made["text"]}):
        assert differing(gradients(ours, inputs), gradients(eager, inputs)) == []
    assert any("made in inference mode" in line for line in report.gradients)


def test_a_backward_frees_what_was_kept_as_it_goes(monkeypatch):
    """As autograd does: the whole of a block would be held beside its gradients otherwise."""
    kept, alive = [], []
    backward, program = BlockPrograms.run_backward, ProgramSites._kernel

    def noted(self, inputs, values, *given, **how):
        kept[:] = map(ref, values)
        return backward(self, inputs, values, *given, **how)

    def counted(*given):
        alive.append(sum(t() is not None for t in kept))
        return program(*given)

    trained = model(layers=1)
    kw.inject(trained)
    gradients(trained, data())
    monkeypatch.setattr(BlockPrograms, "run_backward", noted)
    monkeypatch.setattr(ProgramSites, "_kernel", counted)
    trained(**data()).square().mean().backward(retain_graph=True)
    assert alive[-1] == len(kept)
    alive.clear()
    trained(**data()).square().mean().backward()
    assert max(alive) == len(kept) > 3
    assert alive[-1] <= 1
