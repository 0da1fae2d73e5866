"""The first steps of a recorded block run in the last program of the block before it, as long as
nothing comes between them; whatever does costs speed alone."""

import gc
import itertools
import threading
from types import MethodType
from weakref import ref

import pytest
import torch
from everything import share
from fuser.blocks import Block, drawn
from torch import nn

import kernelwright as kw
from inject.harness import run, same
from inject.tape import graphs_on_the_cpu
from kernelwright import models
from kernelwright.fuser import interpreter
from kernelwright.inject.fp8 import suitable_layers
from kernelwright.inject.reuse.bound import Bound, Variant
from kernelwright.inject.reuse.programs import Programs
from kernelwright.inject.verify import accuracy

LAYERS = 4
# programs of a block alone, of the first with the work for the next, of one between two others, and
# of the last
ALONE, FIRST, BETWEEN, LAST = 6, 6, 5, 4
ALL = FIRST + (LAYERS - 2) * BETWEEN + LAST


class Model(nn.Module):
    """Blocks in a row, and what may come between two of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.order, self.between = range(LAYERS), {}

    def forward(self, x, condition, cos, sin):
        for i in self.order:
            x = self.blocks[i](x, condition, cos, sin)
            if i in self.between:
                x = self.between[i](self, x)
        return x


def latents(tokens=8):
    sizes = {"x": (2, tokens, 64), "condition": (2, 64), "cos": (tokens, 32), "sin": (tokens, 32)}
    return {name: drawn(*size, dtype=torch.float32) for name, size in sizes.items()}


class Counted:
    """The programs of forwards."""

    def __init__(self, monkeypatch):
        self.ran, own = 0, interpreter.run

        def noted(program, given, outputs):
            self.ran += 1
            own(program, given, outputs)

        monkeypatch.setattr(interpreter, "run", noted)

    def __call__(self, model, inputs):
        """The result of a forward, and how many programs ran."""
        self.ran = 0
        result = run(model, inputs)
        return result, self.ran


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def settled(model, inputs, **how):
    """Inject, and run until what is done ahead has been tried."""
    report = kw.inject(model, **how)
    for _ in range(2):
        run(model, inputs)
    return report


def test_blocks_of_no_library(counted):
    model, inputs = Model().eval(), latents()
    expected = run(model, inputs)
    report = kw.inject(model)
    assert same(counted(model, inputs)[0], expected)  # first sight
    assert same(counted(model, inputs)[0], expected)  # the trial
    result, programs = counted(model, inputs)
    assert same(result, expected)
    assert programs == ALL < LAYERS * ALONE
    (line,) = report.blocks
    assert (line.kernels, line.between, line.apart) == (ALONE, BETWEEN, None)
    assert f"{ALONE} kernels, {BETWEEN} between two blocks;" in str(line)
    assert not report.problems
    with torch.inference_mode():
        for _ in range(3):
            counted.ran = 0
            assert torch.equal(model(**inputs), expected)
        assert counted.ran == ALL
    for tokens in (5, 8):  # another size is another recording, made when it comes again
        for _ in range(4):
            result, programs = counted(model, latents(tokens))
        assert programs == ALL
    assert same(result, expected)


# programs of a forward of three blocks of each class: each alone, and with its neighbours. A norm
# for each stream goes, and a SiLU of the time embedding where all blocks have one; where text and
# image are one tensor in the blocks and two between them, so do the copies
PRESETS = {
    "sd3.5-medium": [46, 41],
    "flux-dev": [66, 52],
    "ltx-video": [28, 26],
    "flux2-dev": [54, 48],
    "qwen-image": [39, 34],
    "cogvideox-5b": [30, 26],
}


def deeper(preset, layers=3):
    """A tiny preset with this many blocks of each kind."""
    made = models.build(preset, tiny=True, dtype=torch.float32)
    config = {k: v for k, v in made.config.items() if not k.startswith("_")}
    config |= {k: layers for k in config if k in ("num_layers", "num_single_layers")}
    torch.manual_seed(0)
    return type(made)(**config).eval(), models.inputs(preset, tiny=True, dtype=torch.float32)


@pytest.mark.parametrize("preset", PRESETS)
def test_blocks_of_a_family(preset, counted, monkeypatch):
    model, inputs = deeper(preset)
    expected = run(model, inputs)
    found = []
    for ahead in (False, True):
        with monkeypatch.context() as patched:
            if not ahead:
                patched.setattr(Bound, "learn", lambda self, *_: None)
            report = settled(model, inputs, recipes=False)
            result, programs = counted(model, inputs)
            kw.restore(model)
        assert same(result, expected)
        assert not report.problems
        found.append(programs)
    assert found == PRESETS[preset]


@pytest.mark.parametrize("numerics", ["fused", "fp8"])
@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev", "sd3.5-medium"])
def test_blocks_of_the_other_tiers(preset, numerics, counted, monkeypatch):
    monkeypatch.setattr(suitable_layers, "ROWS", 4)  # a tiny model has fewer rows than fp8 needs
    model, inputs = deeper(preset)
    found, results = [], []
    for ahead in (False, True):
        with monkeypatch.context() as patched:
            if not ahead:
                patched.setattr(Bound, "learn", lambda self, *_: None)
            report = settled(model, inputs, recipes=False, numerics=numerics)
            result, programs = counted(model, inputs)
            kw.restore(model)
        assert not report.problems
        assert all(line.apart is None for line in report.blocks)
        found.append(programs)
        results.append(result)
    assert found[1] < found[0]
    assert same(*results)


TIERS = list(itertools.product(models.presets(), ("fused", "fp8")))


@pytest.mark.parametrize(("preset", "numerics"), share(TIERS, 13, start=3))
def test_other_tiers_give_the_same_bits_at_each_call_and_are_undone(preset, numerics, monkeypatch):
    """The first call records, the second tries what blocks do for the next."""
    monkeypatch.setattr(suitable_layers, "ROWS", 4)
    how = {"tiny": True, "dtype": torch.float32}
    model, inputs = models.build(preset, **how), models.inputs(preset, **how)
    expected = run(model, inputs)
    with kw.injected(model, numerics=numerics, recipes=False) as report:
        first = run(model, inputs)
        for _ in range(3):
            assert same(run(model, inputs), first)
        assert not report.problems
    assert accuracy.error(first, expected) < (1e-4 if numerics == "fused" else 0.5)
    assert same(run(model, inputs), expected)


def between(function):
    """A change of a model: something that happens after its second block."""

    def change(model):
        model.between = {1: function}

    return change


def other_weight(model):
    model.blocks[2].modulation.weight = nn.Parameter(model.blocks[2].modulation.weight * 1.5)


def other_norm(model):
    model.blocks[2].norm = nn.LayerNorm(64, elementwise_affine=False, eps=0.5)


def doubled(module, args, result):
    return 2 * result


def own_forward(model):
    def forward(self, x, *given):
        return type(self).forward(self, 2 * x, *given)

    model.blocks[2].forward = MethodType(forward, model.blocks[2])


def written_between(model, x):
    model.blocks[2].modulation.bias.add_(0.5)
    return x


CHANGES = {
    "a control signal": between(lambda model, x: x + 0.5),
    "a copy": between(lambda model, x: x.clone()),
    "written to": between(lambda model, x: x.mul_(1.5)),
    "a weight written to between them": between(written_between),
    "a weight written to": lambda model: model.blocks[2].modulation.weight.mul_(1.5),
    "a weight through .data": lambda model: model.blocks[2].modulation.weight.data.mul_(1.5),
    "another weight": other_weight,
    "another dtype and back": lambda model: model.blocks[2].modulation.bfloat16().float(),
    "another eps": lambda model: setattr(model.blocks[2].norm, "eps", 0.5),
    "another norm": other_norm,
    "a hook": lambda model: model.blocks[2].register_forward_hook(doubled),
    "a hook inside": lambda model: model.blocks[2].norm.register_forward_hook(doubled),
    "a hook before": lambda model: model.blocks[1].register_forward_hook(doubled),
    "a forward of its own": own_forward,
    "a block left out": lambda model: setattr(model, "order", (0, 1, 3)),
    "the last blocks left out": lambda model: setattr(model, "order", (0, 1)),
    "another order": lambda model: setattr(model, "order", (0, 2, 1, 3)),
    "a block twice": lambda model: setattr(model, "order", (0, 1, 1, 2, 3)),
}


IN_GRAPHS = ("a control signal", "a weight written to", "another eps", "another order")


@pytest.mark.parametrize(
    ("name", "graphs"), [(n, False) for n in CHANGES] + [(n, True) for n in IN_GRAPHS]
)
def test_whatever_comes_between_two_blocks_is_followed(name, graphs):
    change, ours, theirs, inputs = CHANGES[name], Model().eval(), Model().eval(), latents()
    with graphs_on_the_cpu():
        settled(ours, inputs, graphs=graphs)
        run(ours, inputs)
        with torch.no_grad():
            change(ours)
            change(theirs)
        for _ in range(4):
            given = {**inputs, "x": inputs["x"].clone()}
            assert same(run(ours, given), run(theirs, given))


def test_a_guess_that_fails_is_not_made_again(counted):
    model, inputs = Model().eval(), latents()
    report = settled(model, inputs)
    assert counted(model, inputs)[1] == ALL
    CHANGES["a control signal"](model)
    for _ in range(3):
        result, programs = counted(model, inputs)
    # the second block does nothing for the third, which has to do all by itself
    assert programs == FIRST + LAST + FIRST + LAST
    assert "for the next block: it was given other tensors than expected" in str(report.blocks[0])
    model.between = {}
    assert counted(model, inputs)[1] == programs
    kw.restore(model)
    CHANGES["a control signal"](model)
    assert same(run(model, inputs), result)


def test_a_changed_block_is_worked_for_again(counted):
    model, inputs = Model().eval(), latents()
    settled(model, inputs)
    model.blocks[2].norm.eps = 0.5
    for _ in range(5):
        programs = counted(model, inputs)[1]
    assert programs == ALL


RESULTS = pytest.mark.parametrize("which", [0, -1], ids=["its own result", "the next one's rows"])


def check_given_up(which, counted, monkeypatch):
    """A program across two blocks is wrong: both stay apart, with a line in the report."""
    model, inputs = Model().eval(), latents()
    expected, own = run(model, inputs), Variant.outputs

    def wrong(self, *given, **how):
        outputs = own(self, *given, **how)
        if "and the next" in self.recorded.kind:
            outputs[which].mul_(1.01)
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(Variant, "outputs", wrong)
        report = kw.inject(model)
        for _ in range(4):
            assert same(run(model, inputs), expected)
    assert counted(model, inputs)[1] == LAYERS * ALONE
    assert "nothing is done for the next block: differs from eager's" in str(report.blocks[0])


@RESULTS
def test_work_for_the_next_block_that_has_other_bits_is_given_up(which, counted, monkeypatch):
    check_given_up(which, counted, monkeypatch)


def test_values_that_prove_nothing_are_tried_again(counted):
    model, inputs = Model().eval(), latents()
    zeros = {**inputs, "x": torch.zeros_like(inputs["x"]), "condition": 0 * inputs["condition"]}
    report = kw.inject(model)
    run(model, inputs)
    for _ in range(2):
        run(model, zeros)
    for _ in range(4):
        programs = counted(model, inputs)[1]
    assert programs == ALL
    assert report.blocks[0].apart is None


def test_nothing_outlives_a_forward():
    model, inputs = Model().eval(), latents()
    settled(model, inputs)
    alive = ref(run(model, inputs))
    gc.collect()
    assert alive() is None


def test_a_graph_has_the_programs_across_blocks(counted):
    model, inputs = Model().eval(), latents()
    expected = run(model, inputs)
    with graphs_on_the_cpu():
        report = kw.inject(model, graphs=True)
        for _ in range(4):
            assert same(run(model, inputs), expected)
    (graphs,) = report.graphs
    assert graphs.captured == 1
    # in the trial before the capture every block also ran alone
    assert report.blocks[0].between == BETWEEN


def test_threads_do_not_disturb_each_other(counted):
    model, inputs = Model().eval(), latents()
    expected = run(model, inputs)
    settled(model, inputs)
    results = []

    def several():
        results.extend(run(model, inputs) for _ in range(5))

    threads = [threading.Thread(target=several) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    assert all(same(r, expected) for r in results)
    assert counted(model, inputs)[1] == ALL


def test_fused_gives_the_bits_of_the_first_forward_with_fewer_programs(counted):
    model, inputs = Model().eval(), latents()
    kw.inject(model, numerics="fused")
    first, programs = counted(model, inputs)
    for _ in range(3):
        result, later = counted(model, inputs)
        assert same(result, first)
    assert (programs, later) == (LAYERS * ALONE, ALL)


def test_every_weight_of_a_program_across_blocks_has_its_module(monkeypatch):
    """What is kept of a prompt belongs to one: it may be made with weights of the next block."""
    noted, usual = [], Programs._prompts

    def prompts(self, found, layers, owners):
        noted.append((found.recording.weights, [owner() for owner in owners]))
        return usual(self, found, layers, owners)

    monkeypatch.setattr(Programs, "_prompts", prompts)
    model = Model().eval()
    settled(model, latents())
    alone = len(list(model.blocks[0].parameters()))
    assert max(len(names) for names, _ in noted) > alone
    for names, owners in noted:
        assert len(owners) == len(names)
        own = {id(t) for owner in owners for t in owner.parameters(recurse=False)}
        assert len(own) == len(names)
