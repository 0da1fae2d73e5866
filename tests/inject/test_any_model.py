"""Models without a recipe: every transformer of diffusers, language models of transformers, and
models of no library. They run as programs, with eager's bits."""

from functools import partial

import programs_table
import pytest
import torch
import torch.nn.functional as F
from everything import share
from fuser.blocks import Block, drawn
from torch import nn

import kernelwright as kw
from inject.harness import check_restored, programs_of, run, same
from inject.language import model_of, words
from inject.small_models import LANGUAGE, LEFT_OUT, build, classes
from inject.stand_in import CpuGraphs
from inject.test_falcon import SEVEN, falcon
from kernelwright import models
from kernelwright.fuser import planning, recording
from kernelwright.fuser.block_calls import block_calls
from kernelwright.fuser.index import CannotIndex
from kernelwright.fuser.launching import Kernels
from kernelwright.inject.graphs import graphs as graphs_module

# blocks that stay eager, and why
STAY = {
    # an argument is a mask of flex_attention, which is no tensor
    "AnyFlowFARTransformer3DModel": "an input that it may write to",
    # so is a constant of this one
    "Kandinsky6SRTransformer3DModel": "an op that calls Python functions (flex_attention)",
}
# a recipe was written for their blocks
RECIPES = {
    *("FluxTransformer2DModel", "LTXVideoTransformer3DModel"),
    *("LatteTransformer3DModel", "PixArtTransformer2DModel", "PriorTransformer"),
    *("SD3Transformer2DModel", "Transformer2DModel", "TransformerTemporalModel"),
    "WanTransformer3DModel",
}


def check(model, inputs):
    """Eager's bits at first sight and after it, and everything as before in the end."""
    expected = run(model, inputs)
    with kw.injected(model) as report:
        assert same(run(model, inputs), expected)
        assert same(run(model, inputs), expected)
    assert not report.problems, report.problems
    check_restored(model, inputs, expected)
    return report


@pytest.mark.parametrize("name", [n for n in classes() if n not in LEFT_OUT])
def test_a_transformer_of_diffusers(name):
    report = check(*build(name))
    assert report.findings
    fates = report.sites.get("forward as programs", {})
    stay = {why for why in fates if not why.startswith("little to gain")}
    assert stay == ({STAY[name]} if name in STAY else set())
    assert bool(programs_of(report)[0]) == (name not in STAY and name not in RECIPES)


def without_code(model, inputs):
    """The steps of a model's blocks that a GPU has no code for. Here they run without it."""
    found = set()
    for block, args, kwargs in block_calls(model, inputs).values():
        try:
            plan = planning.plan(recording.record(block, args, kwargs), Kernels().why_not)
        except (recording.CannotRecord, CannotIndex):
            continue
        found |= {why for why in plan.refused if "no code" in why or "a power" in why}
    return found


@pytest.mark.parametrize("name", share([n for n in classes() if n not in LEFT_OUT], 3))
def test_a_transformer_has_code_for_a_gpu(name):
    assert not without_code(*build(name, layers=1))


@pytest.mark.parametrize("family", LANGUAGE)
def test_a_language_model_has_code_for_a_gpu(family):
    assert not without_code(model_of(family, torch.bfloat16, **LANGUAGE[family]), words())


def test_nearly_all_transformers_are_tested():
    assert LEFT_OUT.keys() <= set(classes())
    assert len(classes()) - len(LEFT_OUT) >= 55


def test_the_table_in_the_docs_is_of_these_models():
    found = programs_table.rows()
    transformers = {row.model for row in found if "ForCausalLM" not in row.model}
    assert transformers == set(classes()) - LEFT_OUT.keys()
    assert len({row.model for row in found}) == len(transformers) + len(LANGUAGE) + 2
    stay = {row.model: row.why for row in found if row.why and "little to gain" not in row.why}
    assert stay == STAY
    for name in ("AllegroTransformer3DModel", "OvisImageTransformer2DModel"):
        rows = [row for row in found if row.model == name]
        assert rows == list(programs_table.recorded(name, *build(name))), (
            "run docs/programs_table.py"
        )


WITH_RECIPES = ("Llama", "Mistral", "Qwen2", "Qwen3")


@pytest.mark.parametrize("family", [f for f in LANGUAGE if f not in WITH_RECIPES])
def test_a_language_model(family):
    model = model_of(family, **LANGUAGE[family])
    kind = type(model.model.layers[0]).__name__
    assert set(programs_of(check(model, words()))[0]) == {kind}


def test_gemma_3():
    small = {"tiny": True, "dtype": torch.float32}
    model = models.build("gemma-3-12b", **small, layers=2)
    report = check(model, models.inputs("gemma-3-12b", **small, tokens=16))
    assert set(programs_of(report)[0]) == {"Gemma3DecoderLayer"}


@pytest.mark.parametrize("family", [*WITH_RECIPES, "Falcon"])
def test_a_language_model_without_its_recipe(family):
    model = falcon(**SEVEN) if family == "Falcon" else model_of(family)
    expected = run(model, words())
    with kw.injected(model, recipes=False) as report:
        assert all(same(run(model, words()), expected) for _ in range(2))
    assert set(programs_of(report)[0]) == {f"{family}DecoderLayer"}
    check_restored(model, words(), expected)


class Transformer(nn.Module):
    """A diffusion transformer of no library."""

    def __init__(self, block=Block, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(64)

    def forward(self, x, condition, cos, sin):
        for block in self.blocks:
            x = block(x, condition, cos, sin)
        return self.norm(x)


def latents(tokens=12):
    given = [drawn(2, tokens, 64), drawn(2, 64), drawn(tokens, 32), drawn(tokens, 32, seed=1)]
    names = ("x", "condition", "cos", "sin")
    return dict(zip(names, (t.float() for t in given), strict=True))


def test_a_transformer_of_no_library():
    model = Transformer().eval()
    programs, _ = programs_of(check(model, latents()))
    assert set(programs) == {"Block"}
    with kw.injected(model):
        for tokens in (12, 5, 12):  # another length is another recording
            given = latents(tokens)
            with_programs = run(model, given)
            kw.restore(model)
            assert same(run(model, given), with_programs)


class ReturnsMore(Block):
    """Returns, beside its result, something that later calls could share."""

    def __init__(self, what="angles"):
        super().__init__()
        self.what = what

    def forward(self, x, condition, cos, sin):
        x = super().forward(x, condition, cos, sin)
        if self.what == "angles":  # made of what all blocks are given
            return x, F.silu(cos) * 3
        if self.what == "part of it":
            return x, (F.silu(cos) * 3)[:, 1:]
        return x, torch.tensor([1.0, 2.0])


class WritesToResults(Transformer):
    def forward(self, x, condition, cos, sin):
        total = 0
        for block in self.blocks:
            x, more = block(x, condition, cos, sin)
            more += 0.25
            total = total + more.sum()
        return self.norm(x) + total


@pytest.mark.parametrize(
    ("what", "graphs"), [("angles", False), ("part of it", True), ("a constant", False)]
)
def test_a_model_may_write_to_what_its_blocks_return(what, graphs, monkeypatch):
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    model = WritesToResults(partial(ReturnsMore, what), layers=3).eval()
    expected = run(model, latents())
    with kw.injected(model, graphs=graphs) as report:
        assert all(same(run(model, latents()), expected) for _ in range(5))
    assert set(programs_of(report)[0]) == {"ReturnsMore"}


log, notes = [], {}


class Counts(Block):
    calls = 0

    def forward(self, *inputs):
        self.calls += 1
        log.append(self.calls)
        return super().forward(*inputs)


class Logs(Block):
    def forward(self, *inputs):
        log.append(inputs[0].shape)
        return super().forward(*inputs)


class Notes(Block):
    def forward(self, *inputs):
        notes["calls"] = notes.get("calls", 0) + 1
        return super().forward(*inputs)


class Keeps(Block):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def forward(self, *inputs):
        self.seen[len(self.seen)] = inputs[0]
        return super().forward(*inputs)


class Sums(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, *inputs):
        self.total += 1
        return super().forward(*inputs)


class Adds(Sums):
    def forward(self, *inputs):
        self.total.add_(1)
        return Block.forward(self, *inputs)


class Writes(Block):
    """The result of one block is the input that the next one writes to."""

    def forward(self, x, *inputs):
        result = super().forward(x, *inputs)
        x.mul_(0.5)
        return result


class Queues(Block):
    """Fills a list by another name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, *inputs):
        queue = self.seen
        queue.append(inputs[0].shape)
        return super().forward(*inputs)


class Given(Block):
    """Fills a list that it was given, in some of its calls."""

    def forward(self, *inputs, into=None):
        into = log if into is None else into
        into.append(inputs[0].shape)
        return super().forward(*inputs)


class Inherits(Queues):
    def forward(self, *inputs):
        return super().forward(*inputs) * 1.0


class Collects(Block):
    """Fills a list and a dict of its own, which is no effect."""

    def forward(self, *inputs):
        parts, sizes = [], {}

        def joined():
            return torch.cat(parts, -1)

        for part in Block.forward(self, *inputs).chunk(2, -1):
            parts.append(part)
            sizes.update(last=part.shape[-1])
        return joined() * sizes["last"]


def effects(model):
    """What the forwards of these blocks have done so far."""
    kept = [len(getattr(b, "seen", ())) for b in model.blocks]
    total = [b.total.item() for b in model.blocks if hasattr(b, "total")]
    return len(log), notes.get("calls", 0), kept, total


@pytest.mark.parametrize(
    "kind", [Counts, Logs, Notes, Keeps, Sums, Adds, Writes, Queues, Given, Inherits]
)
def test_an_effect_happens_as_often_as_in_eager(kind):
    def three_runs(model):
        log.clear()
        notes.clear()
        given, results = latents(), []
        for _ in range(3):
            results.append(run(model, {**given, "x": given["x"].clone()}))
            results.append(effects(model))
        return results

    expected = three_runs(Transformer(kind).eval())
    model = Transformer(kind).eval()
    with kw.injected(model) as report:
        got = three_runs(model)
    assert same(got, expected)
    assert got[1::2] == expected[1::2]
    assert programs_of(report)[0] == {}


def test_what_a_forward_collects_in_a_list_of_its_own_is_no_effect():
    report = check(Transformer(Collects).eval(), latents())
    assert programs_of(report)[0]


def check_compiled(model, inputs):
    expected = run(model, inputs)
    kw.inject(model)
    run(model, inputs)
    assert same(run(torch.compile(model, backend="eager", fullgraph=True), inputs), expected)


def test_compiled_whole():
    check_compiled(Transformer().eval(), latents())


def test_compiled_whole_with_a_block_that_diffusers_allows_in_graphs():
    check_compiled(*build("QwenImageTransformer2DModel"))


def test_a_block_with_a_part_that_is_skipped_is_left_alone():
    model, inputs = build("QwenImageTransformer2DModel")
    report = kw.inject(model, skip="transformer_blocks.0.attn")
    lines = {line.left_alone for line in report.lines if line.kind.endswith("TransformerBlock")}
    assert "skip names a part of it" in lines
    with torch.no_grad():
        model(**inputs)
    kw.restore(model)
