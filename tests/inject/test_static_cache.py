"""Decoding into a static cache: RoPE and the cache's update as one op, with eager's bits."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import cache_utils

import kernelwright as kw
from inject.language import SIZES, model_of
from kernelwright.inject.fusions import static_cache
from kernelwright.ops.rope_into_cache import ROPE_INTO_CACHE

from .tape import graphs_on_the_cpu

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
FULL = {"sliding_window": None}
STEPS = 32


@pytest.fixture
def calls(monkeypatch):
    """The layers of the cache, by address, that the op has written to."""
    seen = []
    usual = ROPE_INTO_CACHE.run
    place = ROPE_INTO_CACHE.arguments.index("keys")

    def run(*args):
        seen.append(args[place].data_ptr())
        return usual(*args)

    monkeypatch.setattr(ROPE_INTO_CACHE, "run", run)
    return seen


@pytest.fixture
def dispatched(monkeypatch):
    """Calls that came by the dispatcher, as those do that are captured and replayed here."""
    seen = []
    usual = ROPE_INTO_CACHE.compute

    def compute(args, *how):
        seen.append(args)
        return usual(args, *how)

    monkeypatch.setattr(ROPE_INTO_CACHE, "compute", compute)
    return seen


def prompt(batch=2, tokens=5, padding=0):
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(3, SIZES["vocab_size"], (batch, tokens), generator=draw)
    mask = torch.ones_like(words)
    mask[0, :padding] = 0
    return {"input_ids": words, "attention_mask": mask}


def new_cache(model, kind=None):
    return (kind or transformers.StaticCache)(config=model.config, max_cache_len=64)


def steps(model, cache, tokens=5, count=6, each=1):
    """Logits and the state of the cache after each step, the first of which is the prompt."""
    words, found = prompt(tokens=tokens)["input_ids"], []
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=words, past_key_values=cache, use_cache=True).logits
            words = logits[:, -each:].argmax(-1)
            state = [(s.keys, s.values, s.cumulative_length) for s in cache.layers]
            found.append((logits, copy.deepcopy(state)))
    return found


def same(got, want):
    return all(
        torch.equal(a, b) and all(map(torch.equal, sum(s, ()), sum(t, ())))
        for (a, s), (b, t) in zip(got, want, strict=True)
    )


def written(calls, cache):
    """How many calls wrote to the cache itself, and not to a copy."""
    return sum(calls.count(layer.keys.data_ptr()) for layer in cache.layers)


@pytest.mark.parametrize(
    ("batch", "padding", "graphs"), [(1, 0, True), (3, 2, False)], ids=["graphs", "padded"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_and_logits_of_eager(
    calls, dispatched, family, batch, padding, graphs
):
    model = model_of(family, torch.bfloat16, **FULL)
    given = prompt(batch, padding=padding)
    how = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    how |= {"cache_implementation": "static", "disable_compile": True}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    want = model.generate(**given, **how)
    with graphs_on_the_cpu(), kw.injected(model, graphs=graphs) as report:
        got = model.generate(**given, **how)
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits))
    assert written(calls, got.past_key_values)
    assert report.sites[static_cache.SITE] == {"fused": 2}
    # both layers, in all steps but the first ones, which a capture takes
    assert not graphs or len(dispatched) >= 2 * (STEPS - 4)


@pytest.mark.parametrize("numerics", ["exact", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_eagers_after_each_step(calls, family, numerics):
    model = model_of(family, **FULL)
    cache = new_cache(model)
    want = steps(model, new_cache(model))
    with kw.injected(model, numerics=numerics):
        got = steps(model, cache)
    if numerics == "exact":
        assert same(got, want)
    for (logits, state), (expected, theirs) in zip(got, want, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for layer, own in zip(state, theirs, strict=True):
            torch.testing.assert_close(layer, own, rtol=1e-4, atol=1e-4)
            assert torch.equal(layer[2], own[2])
    # of both layers, after the prompt; the first step is not compared yet
    assert written(calls, cache) == 2 * (4 if numerics == "exact" else 5)


@pytest.mark.parametrize(("tokens", "count", "fused"), [(17, 3, 0), (16, 3, 2), (1, 2, 2)])
def test_a_few_tokens_at_a_time_are_decoded(calls, tokens, count, fused):
    """A prompt that is as long as a step has its layout, and makes the cache: it comes first. The
    first step after it is a further shape, which is compared at the next, but for one token: zero
    angles of a prompt of one token prove nothing, so there is no other shape."""
    model = model_of("Llama", **FULL)
    cache = new_cache(model)
    want = steps(model, new_cache(model), tokens, count, tokens)
    with kw.injected(model):
        assert same(steps(model, cache, tokens, count, tokens), want)
    assert written(calls, cache) == fused


class Subclass(transformers.StaticCache):
    pass


def patched_cache(model):
    cache = new_cache(model)
    cache.update = functools.partial(type(cache).update, cache)
    return cache


def patched_layers(model):
    cache = new_cache(model)
    for layer in cache.layers:
        layer.update = functools.partial(type(layer).update, layer)
    return cache


def other_layout(model):
    cache = new_cache(model)
    shape = 2, SIZES["num_key_value_heads"], SIZES["head_dim"]
    cache.early_initialization(*shape, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        layer.values = layer.values.transpose(1, 2).contiguous().transpose(1, 2)
    return cache


@pytest.mark.parametrize(
    "made",
    [functools.partial(new_cache, kind=Subclass), patched_cache, patched_layers, other_layout],
    ids=["a subclass", "an update of its own", "layers with an own update", "another layout"],
)
def test_a_cache_of_another_kind_is_updated_by_itself(calls, made):
    model = model_of("Llama", **FULL)
    want = steps(model, made(model))
    with kw.injected(model):
        assert same(steps(model, made(model)), want)
    assert not calls


def test_a_sliding_window_is_updated_by_itself(calls):
    model = model_of("Mistral", sliding_window=4)
    want = steps(model, new_cache(model))
    with kw.injected(model):
        assert same(steps(model, new_cache(model)), want)
    assert not calls


@pytest.mark.parametrize("name", ["Cache", "StaticLayer"])
def test_an_update_that_somebody_has_wrapped_is_called(calls, monkeypatch, name):
    model = model_of("Llama", **FULL)
    kind, seen = getattr(cache_utils, name), []
    usual = kind.update

    @functools.wraps(usual)
    def update(*args, **kwargs):
        seen.append(1)
        return usual(*args, **kwargs)

    monkeypatch.setattr(kind, "update", update)
    with kw.injected(model):
        steps(model, new_cache(model), count=3)
    assert len(seen) == 2 * 3
    assert not calls


def test_gradients_are_recorded_as_before(calls):
    model = model_of("Llama", **FULL)
    words = prompt()["input_ids"]
    with kw.injected(model):
        cache = new_cache(model)
        with torch.no_grad():
            model(input_ids=words, past_key_values=cache)
        model(input_ids=words[:, :1], past_key_values=cache).logits.sum().backward()
    assert not calls


@pytest.mark.parametrize("what", ["out", "keys", "values", "length"])
@pytest.mark.parametrize("tokens", [5, 1], ids=["first sight", "later"])
def test_a_kernel_that_differs_leaves_the_cache_alone(monkeypatch, what, tokens):
    """With a prompt of one token its forward is compared before the op can run."""
    model = model_of("Llama", **FULL)
    want = steps(model, new_cache(model), tokens)
    usual = ROPE_INTO_CACHE.run

    def wrong(*args):
        named = dict(zip(ROPE_INTO_CACHE.arguments, args, strict=False))
        named["out"] = usual(*args)
        named[what] += 1
        return named["out"]

    monkeypatch.setattr(ROPE_INTO_CACHE, "run", wrong)
    with kw.injected(model), pytest.warns(UserWarning, match=static_cache.SITE):
        assert same(steps(model, new_cache(model), tokens), want)


def test_a_kernel_that_cannot_run_leaves_the_cache_alone(monkeypatch):
    model = model_of("Llama", **FULL)
    want = steps(model, new_cache(model))

    def refused(*args):
        raise ValueError("no kernel for this")

    monkeypatch.setattr(ROPE_INTO_CACHE, "run", refused)
    with kw.injected(model) as report:
        assert same(steps(model, new_cache(model)), want)
    assert report.sites[static_cache.SITE] == {"no kernel for this": 2}
