"""Language models that generate, with graphs: each step has the bits of an un-injected run."""

import copy
import gc
import itertools
import weakref

import pytest
import torch

import kernelwright as kw
from kernelwright import models

from .tape import graphs_on_the_cpu

transformers = pytest.importorskip("transformers")
NAMES = (
    *("llama-3-8b", "mistral-7b", "qwen3-8b", "gemma-3-12b", "gemma-4-31b", "phi-3-mini"),
    *("phi-4", "glm-4-9b"),
)
STATIC = {"cache_implementation": "static", "disable_compile": True}
STEPS = 12


@pytest.fixture(autouse=True)
def graphs_here():
    with graphs_on_the_cpu():
        yield


def built(name):
    return models.build(name, tiny=True, dtype=torch.float32)


def prompt(model, batch=2, tokens=7, padding=0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(
        3, model.config.get_text_config().vocab_size, (batch, tokens), generator=draw
    )
    mask = torch.ones_like(words)
    mask[0, :padding] = 0
    return {"input_ids": words, "attention_mask": mask}


def generated(model, given, **how):
    how = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, **how}
    torch.manual_seed(0)
    return model.generate(**given, **how, return_dict_in_generate=True, output_logits=True)


def same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits))


@pytest.mark.compatibility("generate with a static cache")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_with_a_static_cache_are_replays(name, batch):
    model = built(name)
    given = prompt(model, batch)
    want = generated(model, given, **STATIC)
    with kw.injected(model, graphs=True) as report:
        same(generated(model, given, **STATIC), want)
        (graphs,) = report.graphs
        assert graphs.captured == 1, graphs.describe()
        # the first steps: one without a graph, one for the capture, one that confirms it
        assert replays(graphs) >= STEPS - 3
    same(generated(model, given, **STATIC), want)


def replays(graphs):
    return graphs._recorder.replayed


def test_the_next_call_takes_over_the_memory_of_the_last():
    model = built("llama-3-8b")
    prompts = [prompt(model, seed=seed, padding=seed) for seed in range(3)]
    want = [generated(model, given, **STATIC) for given in prompts]
    with kw.injected(model, graphs=True) as report:
        for given, expected in zip(prompts, want, strict=True):
            got = generated(model, given, **STATIC)
            same(got, expected)
            cache = weakref.ref(got.past_key_values)
            del got
            gc.collect()
            assert cache() is None  # a graph keeps no cache of a caller
        assert report.graphs[0].captured == 1


def test_a_cache_that_its_owner_still_has_is_left_alone():
    model = built("llama-3-8b")
    first, second = prompt(model, seed=1), prompt(model, seed=2)
    want = generated(model, second, **STATIC)
    with kw.injected(model, graphs=True) as report:
        kept = generated(model, first, **STATIC)
        before = [copy.deepcopy(layer.keys) for layer in kept.past_key_values.layers]
        same(generated(model, second, **STATIC), want)
        after = [layer.keys for layer in kept.past_key_values.layers]
        assert all(map(torch.equal, before, after))
        assert any("still in use" in reason for reason in report.graphs[0].reasons)


def test_samples_are_drawn_as_before():
    model = built("qwen3-8b")
    given = prompt(model, padding=3)
    how = {**STATIC, "do_sample": True, "top_k": 20}
    want = generated(model, given, **how)
    with kw.injected(model, graphs=True):
        same(generated(model, given, **how), want)


def test_a_dynamic_cache_runs_without_a_graph_and_says_so():
    model = built("llama-3-8b")
    given = prompt(model)
    want = generated(model, given)
    with kw.injected(model, graphs=True) as report:
        same(generated(model, given), want)
        (graphs,) = report.graphs
        assert graphs.captured == 0
        assert any("DynamicCache" in r and "static" in r for r in graphs.reasons)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-12b"])
def test_weights_written_between_steps_set_the_cache_back(name):
    """The replay with the old weights has written to the cache, the plain step writes again."""
    model = built(name)
    twin = copy.deepcopy(model)

    def steps(model, changed_at):
        words = prompt(model)["input_ids"]
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        found = []
        with torch.no_grad():
            for step in range(14):
                if step == changed_at:
                    first_layer = next(m for m in model.modules() if hasattr(m, "up_proj"))
                    first_layer.up_proj.weight.data.mul_(1.5)
                logits = model(input_ids=words, past_key_values=cache, use_cache=True).logits
                words = logits[:, -1:].argmax(-1)
                found.append(logits)
        return found, cache

    want, expected = steps(twin, 11)
    with kw.injected(model, graphs=True):
        got, cache = steps(model, 11)
    assert all(map(torch.equal, got, want))
    for a, b in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.cumulative_length, b.cumulative_length)


def test_a_sliding_window_has_a_graph_before_it_is_full_and_one_after():
    model = built("gemma-3-12b")
    window = model.config.get_text_config().sliding_window
    given = prompt(model, tokens=2)
    how = {**STATIC, "max_new_tokens": 2 * window, "min_new_tokens": 2 * window}
    want = generated(model, given, **how)
    with kw.injected(model, graphs=True) as report:
        for _ in range(2):
            same(generated(model, given, **how), want)
        assert report.graphs[0].captured == 2


def test_generate_does_not_compile_the_model_while_graphs_replay_it(monkeypatch):
    model = built("llama-3-8b")
    compiled = []
    monkeypatch.setattr(
        type(model), "get_compiled_call", lambda self, config: compiled.append(1) or self.__call__
    )
    everywhere = transformers.CompileConfig()
    everywhere._compile_all_devices = True  # usually on GPUs alone
    how = {"cache_implementation": "static", "compile_config": everywhere}
    generated(model, prompt(model), **how)
    assert len(compiled) == 1
    with kw.injected(model, graphs=True):
        generated(model, prompt(model), **how)
    assert len(compiled) == 1
    with kw.injected(model):
        generated(model, prompt(model), **how)
    assert len(compiled) == 2
    assert "_valid_auto_compile_criteria" not in vars(model)


@pytest.mark.parametrize(("noise", "captured"), [(1e-4, 1), (0.5, 0)], ids=["rounding", "state"])
def test_attention_that_differs_from_call_to_call_is_replayed_if_it_is_near(
    monkeypatch, noise, captured
):
    """cuDNN's attention of one token with thousands adds in any order."""
    usual, calls = torch.nn.functional.scaled_dot_product_attention, itertools.count()

    def attend(*args, **how):
        return usual(*args, **how) * (1 + noise * (next(calls) % 3))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model = built("llama-3-8b")
    given = prompt(model, 1)
    want = generated(model, given, **STATIC)
    with kw.injected(model, graphs=True) as report:
        for _ in range(3):
            got = generated(model, given, **STATIC)
    (graphs,) = report.graphs
    assert graphs.captured == captured, graphs.describe()
    assert captured or "other bits than the plain forward" in graphs.describe()
    near = {"rtol": 20 * noise, "atol": 20 * noise}
    torch.testing.assert_close(got.logits[1], want.logits[1], **near)


def test_what_changes_inside_the_body_between_calls_is_followed():
    """The state of the whole model covers its body, and is checked at each call."""
    model = built("llama-3-8b")
    given = prompt(model, 1)
    with kw.injected(model, graphs=True) as report:
        for _ in range(3):
            generated(model, given, **STATIC)
        assert report.graphs[0].captured == 1
        for factor in (2.0, 0.5):
            twin = copy.deepcopy(model)
            kw.restore(twin)
            for each in (model, twin):
                each.model.layers[0].self_attn.scaling *= factor
            want = generated(twin, given, **STATIC)
            for _ in range(3):
                same(generated(model, given, **STATIC), want)
