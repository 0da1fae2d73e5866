"""What depends only on the text is computed once per prompt, and again when anything changes."""

from weakref import ref

import pytest
import torch
from diffusers.models.embeddings import PixArtAlphaTextProjection
from everything import share
from torch import nn
from torch.nn.utils import parametrize

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.graphs import capture
from kernelwright.inject.graphs import graphs as graphs_module
from kernelwright.inject.reuse.prompt_values import PerForwardCache, Prompts
from kernelwright.inject.runtime import model_run
from kernelwright.inject.state.tensor_samples import TensorSamples

from .harness import run, same
from .stand_in import CpuGraphs, alignment_of_new_memory  # noqa: F401

TEXT = "encoder_hidden_states"


@pytest.fixture
def made(monkeypatch):
    """Counts the projections of a prompt."""
    counts, once = [], Prompts.once

    def counted(self, owner, source, weights, make, *kind):
        return once(self, owner, source, weights, lambda: counts.append(1) or make(), *kind)

    monkeypatch.setattr(Prompts, "once", counted)
    return counts


def built(name="ltx-video"):
    how = {"tiny": True, "dtype": torch.float32}
    return models.build(name, **how), models.inputs(name, **how)


# by their recipes, and as programs of the fuser, which finds by itself what a prompt is
HOW = pytest.mark.parametrize("recipes", [True, False], ids=["recipes", "programs"])


@HOW
@pytest.mark.parametrize(
    "name", ["ltx-video", "pixart", "sdxl-unet", "ltx-2", "wan-1.3b", "sana-1.6b"]
)
def test_a_prompt_is_used_again_as_long_as_it_is_the_same(name, recipes, made):
    model, inputs = built(name)
    expected = run(model, inputs)
    kw.inject(model, recipes=recipes)
    for _ in range(3):  # results are not cached during a comparison
        assert same(run(model, inputs), expected)
    blocks = sum(hasattr(m, "attn2") for m in model.modules())
    first = len(made)
    assert first >= blocks
    assert same(run(model, inputs), expected)
    assert len(made) == first


def change_text(model, inputs):
    inputs[TEXT] = inputs[TEXT] + 1


def write_to_text(model, inputs):
    inputs[TEXT].add_(1)


def write_to_weight(model, inputs):
    model.transformer_blocks[0].attn2.to_v.weight.mul_(2)


def replace_weight(model, inputs):
    layer = model.transformer_blocks[1].attn2.to_k
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def merge_adapter(model, inputs):
    """As peft does: wrap, add to the data of the weight, unwrap."""
    attn = model.transformer_blocks[0].attn2
    layer, wrapper = attn.to_v, nn.Module()
    wrapper.base_layer = layer
    layer.weight.data += 1
    attn.to_v = layer


def hook(model, inputs):
    model.caption_projection.linear_1.register_forward_hook(lambda m, a, out: out * 2)


CHANGES = (change_text, write_to_text, write_to_weight, replace_weight, merge_adapter, hook)


# with graphs and recipes, or with neither, or with one of them
WAYS = [(False, True), (True, True), (True, False), (False, False)]


@pytest.mark.parametrize(
    ("change", "graphs", "recipes"),
    [(c, *way) for n, c in enumerate(CHANGES) for way in share(WAYS, 2, start=n)],
)
@torch.no_grad()
def test_whatever_changes_is_seen_at_once(change, graphs, recipes, monkeypatch):
    if graphs:
        monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    model, inputs = built()
    kw.inject(model, graphs=graphs, recipes=recipes)
    for _ in range(4):
        before = run(model, inputs)
    change(model, inputs)
    results = [run(model, inputs) for _ in range(4)]
    kw.restore(model)
    expected = run(model, inputs)
    assert not same(expected, before)
    assert all(same(result, expected) for result in results)


@pytest.mark.parametrize(
    ("name", "recipes", "before_blocks"),
    [("ltx-video", True, 1), ("ltx-video", False, 1), ("sana-1.6b", True, 2)],  # its norm too
)
def test_a_graph_makes_them_only_for_a_new_prompt(name, recipes, before_blocks, monkeypatch, made):
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    model, inputs = built(name)
    report = kw.inject(model, graphs=True, recipes=recipes)
    for _ in range(4):
        run(model, inputs)
    assert report.graphs[0].captured == 1
    made.clear()
    other = {**inputs, "hidden_states": inputs["hidden_states"] + 1}
    result = run(model, other)
    assert not made
    change_text(model, other)
    changed = run(model, other)
    assert len(made) == before_blocks + len(model.transformer_blocks)
    kw.restore(model)
    assert same(changed, run(model, other))
    assert same(result, run(model, {**other, TEXT: inputs[TEXT]}))


class WritesToText(nn.Module):
    """Writes to what a part of it, which is computed once per prompt, has returned."""

    def __init__(self):
        super().__init__()
        self.caption_projection = PixArtAlphaTextProjection(16, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 8)

    def forward(self, hidden_states, encoder_hidden_states):
        text = self.caption_projection(encoder_hidden_states)
        text += 0.5
        text = self.norm(text)
        text[:, 1:] *= 2
        return self.out(hidden_states + text)


@pytest.mark.parametrize("graphs", [False, True])
@torch.no_grad()
def test_a_model_may_write_to_what_is_computed_once(graphs, monkeypatch):
    monkeypatch.setattr(graphs_module, "Graphs", CpuGraphs)
    torch.manual_seed(0)
    model = WritesToText().eval().requires_grad_(False)
    inputs = {"hidden_states": torch.randn(2, 4, 32), TEXT: torch.randn(2, 4, 16)}
    expected = run(model, inputs)
    kw.inject(model, graphs=graphs)
    assert all(same(run(model, inputs), expected) for _ in range(5))


class ReturnsText(nn.Module):
    def __init__(self):
        super().__init__()
        self.caption_projection = PixArtAlphaTextProjection(16, 32)

    def forward(self, text):
        text = self.caption_projection(text)
        return text * 2, text[:, 1:]


@torch.no_grad()
def test_what_a_user_writes_to_a_result_is_in_no_other_result():
    model = ReturnsText().eval().requires_grad_(False)
    text = torch.randn(2, 4, 16)
    expected = model(text)
    kw.inject(model)
    results = [model(text) for _ in range(4)]
    for result in results:
        assert same(result, expected)
        result[1].zero_()
    assert same(model(text), expected)


def test_inference_mode_keeps_nothing(made):
    """Its tensors have no version counter."""
    model, inputs = built()
    kw.inject(model)
    with torch.inference_mode():
        inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        model(**inputs)
        inputs[TEXT].add_(1)
        result = model(**inputs)
        kw.restore(model)
        assert same(result, model(**inputs))


def test_what_was_made_before_a_recording_is_no_part_of_it():
    shared, made, text = PerForwardCache(), [], torch.ones(1)

    def make():
        shared(text, None, lambda: made.append(1))

    with model_run.begin(nn.Identity(), (text,), {}, TensorSamples()):
        make()
        make()
        assert len(made) == 1
        with capture.recording():
            make()
        assert len(made) == 2
        make()
        assert len(made) == 3


def test_what_blocks_share_is_made_once_in_a_forward():
    shared, made, text = PerForwardCache(), [], torch.ones(1)
    for _ in range(2):
        with model_run.begin(nn.Identity(), (text,), {}, TensorSamples()):
            shared(text, None, lambda: made.append(1))
    assert len(made) == 2
    shared(text, None, lambda: made.append(1))
    assert len(made) == 3, "outside a forward nothing says when to make it anew"


def test_what_blocks_share_is_let_go_after_the_forward():
    shared, text = PerForwardCache(), torch.ones(1)
    with model_run.begin(nn.Identity(), (text,), {}, TensorSamples()):
        made = ref(shared(text, None, lambda: torch.ones(3)))
        assert made() is not None
    assert made() is None


def test_what_blocks_share_is_let_go_after_a_forward_that_fails():
    shared, text, made = PerForwardCache(), torch.ones(1), []

    def fails():
        with model_run.begin(nn.Identity(), (text,), {}, TensorSamples()):
            made.append(ref(shared(text, None, lambda: torch.ones(3))))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert made[0]() is None


class Counting(nn.Module):
    """Counts how often a weight is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return 2 * weight


def test_a_parametrized_weight_is_computed_as_often_as_without_injection():
    model, inputs = built("pixart")
    kw.inject(model)
    with torch.no_grad():
        model(**inputs)
        layer, counting = model.transformer_blocks[1].attn2.to_v, Counting()
        parametrize.register_parametrization(layer, "weight", counting)
        counting.count = 0
        for calls in (1, 2):
            model(**inputs)
            assert counting.count == calls
