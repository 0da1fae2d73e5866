"""Decoder layers that are given a key-value cache run as programs too: what they call of the cache,
and attention over it, is called anew, and everything else does not depend on its length."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import programs_of, same, tensors
from inject.language import model_of
from inject.small_models import LANGUAGE
from kernelwright import models
from kernelwright.fuser import cached_attention
from kernelwright.inject.runtime import comparisons, model_run
from kernelwright.inject.runtime.input_key import WRITES_TO_INPUT

transformers = pytest.importorskip("transformers")
PLAIN = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "disable_compile": True}
WITH_LOGITS = {"return_dict_in_generate": True, "output_logits": True}
STATIC = {"cache_implementation": "static"}
# what generate is asked for: (how, the first words of the first sequence that are padding)
WAYS = {
    "growing": ({}, 0),
    "growing and padded": ({}, 3),
    "static": (STATIC, 0),
    "static and padded": (STATIC, 3),
    "beams": ({"num_beams": 2}, 2),
}
CALLS = {"attention over cache": 1, "cache update": 1}


def built(family):
    if family == "Gemma3":
        return models.build("gemma-3-12b", tiny=True, dtype=torch.float32)
    return model_of(family, **LANGUAGE.get(family, {}))


def drawn(batch=2, tokens=7, seed=0):
    return torch.randint(3, 100, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def generated(model, padding=0, **how):
    words = drawn()
    mask = torch.ones_like(words)
    mask[0, :padding] = 0
    how = {**PLAIN, **how, **WITH_LOGITS}
    found = model.generate(input_ids=words, attention_mask=mask, **how)
    return found.sequences, found.logits, contents(found.past_key_values)


def contents(cache, places=None):
    layers = cache.layers if places is None else [cache.layers[i] for i in places]
    return [(layer.keys, layer.values) for layer in layers]


FAMILIES = [*LANGUAGE, "Gemma3"]
CASES = [(f, w) for w in WAYS for f in FAMILIES]


@pytest.mark.compatibility("generate with a dynamic cache")
@pytest.mark.parametrize(("family", "way"), share(CASES, 3))
def test_tokens_logits_and_caches_are_those_of_eager(family, way):
    model, (how, padding) = built(family), WAYS[way]
    want = generated(model, padding, **how)
    with kw.injected(model, recipes=False) as report:
        for _ in range(2):
            assert same(generated(model, padding, **how), want)
    assert not report.problems
    (line,) = report.blocks
    assert line.kernels, line
    assert CALLS.items() <= line.left.items()
    assert same(generated(model, padding, **how), want)


@pytest.mark.parametrize("way", ["growing", "growing and padded"])
def test_layers_beside_those_with_linear_attention(way):
    kinds = ["linear_attention", "full_attention"] * 2
    sizes = {
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    }
    model = model_of("Qwen3Next", num_hidden_layers=4, layer_types=kinds, **sizes)
    how, padding = WAYS[way]

    def found():
        answer = model.generate(
            input_ids=drawn(), attention_mask=mask, **PLAIN, **how, **WITH_LOGITS
        )
        return answer.sequences, answer.logits, contents(answer.past_key_values, {1, 3})

    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :padding] = 0
    want = found()
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(found(), want)
    assert not report.problems
    recorded, other = sorted(report.blocks, key=lambda line: not line.kernels)
    assert CALLS.items() <= recorded.left.items()
    assert other.why == (WRITES_TO_INPUT,)


class Counted:
    """How often programs ran as programs of a block that updates a cache."""

    def __init__(self, monkeypatch):
        self.updates = 0
        own = cached_attention.CacheUpdate.__call__

        def update(*args):
            self.updates += 1
            return own(*args)

        monkeypatch.setattr(cached_attention.CacheUpdate, "__call__", update)


def test_a_block_is_recorded_once_for_all_lengths(monkeypatch):
    model, counted = built("Phi3"), Counted(monkeypatch)
    words = drawn(tokens=40)

    def steps():
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            return [
                model(input_ids=words[:, i : i + 1], past_key_values=cache).logits
                for i in range(40)
            ]

    want = steps()
    with kw.injected(model):
        assert same(steps(), want)
        counted.updates = 0
        assert same(steps(), want)
    assert counted.updates == 40 * len(model.model.layers)


def chunked(model, *sizes):
    """The logits of a text that comes in chunks, and the cache after each."""
    cache, found, start = transformers.DynamicCache(config=model.config), [], 0
    words = drawn(tokens=sum(sizes))
    for size in sizes:
        with torch.no_grad():
            logits = model(input_ids=words[:, start : start + size], past_key_values=cache).logits
        start += size
        found.append((logits, [(k.clone(), v.clone()) for k, v in contents(cache)]))
    return found


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (7, 1, 1, 1, 4, 1, 4, 1), (20,)])
def test_each_call_writes_to_its_cache_once(sizes):
    """Also the calls in which a block is compared and recorded; the window of Gemma overflows."""
    model = built("Gemma3")
    want = chunked(model, *sizes)
    with kw.injected(model):
        for _ in range(3):
            assert same(chunked(model, *sizes), want)


def test_a_model_that_makes_its_own_cache():
    model, words = built("Granite"), drawn()

    def call():
        with torch.no_grad():
            found = model(input_ids=words)
        return found.logits, contents(found.past_key_values)

    want = call()
    with kw.injected(model) as report:
        for _ in range(3):
            assert same(call(), want)
    assert programs_of(report)[0]


@pytest.mark.parametrize("how", [{}, STATIC], ids=["growing", "static"])
def test_layers_with_adapters(how):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(built("Glm4"), config).eval()
    want = generated(model, **how)
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(generated(model, **how), want)
    assert programs_of(report)[0]


def test_inference_mode():
    model = built("Gemma3")

    def steps():
        with torch.inference_mode():
            return chunked(model, 5, 1, 1, 1)

    want = steps()
    with kw.injected(model) as report:
        for _ in range(3):
            assert same(steps(), want)
    assert programs_of(report)[0]


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "at the end of the forward"])
def test_a_forward_that_writes_something_else_to_its_cache_is_found(waits, monkeypatch):
    """Nothing but the next token would show it."""
    if waits:
        monkeypatch.setattr(comparisons, "can_wait", lambda: model_run.active.at_end is not None)
    model = built("Olmo2")
    want = generated(model)
    own = cached_attention.CacheUpdate.__call__

    def off_by_a_bit(call, cache, owner, given):
        result = own(call, cache, owner, given)
        layer = cache.layers[owner.layer_idx]
        layer.keys = layer.keys + 1e-6
        return result

    monkeypatch.setattr(cached_attention.CacheUpdate, "__call__", off_by_a_bit)
    with kw.injected(model) as report, pytest.warns(match="differs from eager"):
        assert same(generated(model), want)
    assert report.problems


def test_no_cache_is_kept_alive():
    model = built("Phi3")
    with kw.injected(model):
        for _ in range(3):
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                model(input_ids=drawn(), past_key_values=cache)
            gone = weakref.ref(cache)
            del cache
            gc.collect()
            assert gone() is None


class Attention(nn.Module):
    """Attention of nobody's, that looks at what its cache returns."""

    def __init__(self, layer_idx, look):
        super().__init__()
        self.layer_idx, self.look = layer_idx, look
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, past_key_values=None, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        k, v = past_key_values.update(k, v, self.layer_idx)
        k = self.look(past_key_values, k, attention_mask)
        y = F.scaled_dot_product_attention(q, k, v, attention_mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, layer_idx, look):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.RMSNorm(32)
        self.attention = Attention(layer_idx, look)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, scale, past_key_values=None, attention_mask=None):
        y = self.norm1(x) * (1 + scale) + scale
        x = x + scale * self.attention(y, past_key_values, attention_mask)
        y = self.norm2(x) * (1 + scale) + scale
        return x + scale * self.down(F.gelu(self.up(y)))


class Decoder(nn.Module):
    def __init__(self, look):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i, look) for i in range(2))

    def forward(self, x, past_key_values, attention_mask=None):
        for layer in self.layers:
            x = layer(
                x, x.mean(1, True), past_key_values=past_key_values, attention_mask=attention_mask
            )
        return x


def longest(cache, keys, mask):
    return keys * 2 if keys.shape[2] > 6 else keys


def shifted(cache, keys, mask):
    return keys - keys.mean(2, True)


def asks_its_cache(cache, keys, mask):
    return keys * 2 if cache.get_seq_length() > 6 else keys


def asks_whether_there_is_something(cache, keys, mask):
    return keys * 2 if cache else keys


def as_long_as_the_mask(cache, keys, mask):
    return keys * 2 if mask.shape[-1] > 6 else keys


def nothing(cache, keys, mask):
    return keys if keys.dtype is torch.float32 and keys.ndim == 4 else None


LOOKS = {
    longest: "computes with the keys and values of its cache outside of attention",
    shifted: "computes with the keys and values of its cache outside of attention",
    as_long_as_the_mask: "computes with the keys and values of its cache outside of attention",
    asks_its_cache: "it reads get_seq_length of its cache",
    asks_whether_there_is_something: "how many layers its cache has",
    nothing: None,
}


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_a_forward_that_depends_on_the_length_of_its_cache_stays_as_it_was(look):
    model = Decoder(look).eval()
    given = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))

    def steps():
        cache, found = transformers.DynamicCache(), []
        for i in range(12):
            mask = torch.ones(2, 1, 1, i + 1, dtype=torch.bool)
            with torch.no_grad():
                found.append(model(given[:, i : i + 1], cache, attention_mask=mask))
        return found

    want = steps()
    with kw.injected(model) as report:
        for _ in range(2):
            assert same(steps(), want)
    (line,) = report.blocks
    if LOOKS[look] is None:
        assert line.kernels
        assert CALLS.items() <= line.left.items()
    else:
        assert not line.kernels
        assert LOOKS[look] in "; ".join(line.why)


class Counting(transformers.DynamicCache):
    """A cache of somebody's: it may do anything."""

    def update(self, *args, **kwargs):
        self.updates = getattr(self, "updates", 0) + 1
        return super().update(*args, **kwargs)


def test_a_cache_of_ones_own_is_left_alone():
    model = Decoder(nothing).eval()
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with kw.injected(model) as report:
        for _ in range(3):
            cache = Counting()
            with torch.no_grad():
                model(x, cache)
            assert cache.updates == 2
    assert "an input that it may write to" in "; ".join(report.blocks[0].why)


@pytest.mark.parametrize("numerics", ["fused", "fp8"])
def test_tiers_that_round_otherwise_come_near(numerics):
    model = models.build("gemma-3-12b", tiny=True, dtype=torch.bfloat16)
    want = chunked(model, 6, 1, 1, 1, 1)
    with kw.injected(model, numerics=numerics, verify=True) as report:
        for _ in range(2):
            got = chunked(model, 6, 1, 1, 1, 1)
    assert not report.problems
    assert programs_of(report)[0]
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        off = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert off < (0.02 if numerics == "fused" else 0.2)


def test_training_runs_as_without_injection():
    model, words = built("Phi3").train(), drawn()

    def step():
        model.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    want = step()
    with kw.injected(model) as report:
        with pytest.warns(match="Phi3DecoderLayer.*pass use_cache=False") as warned:
            assert same(step(), want)
        assert len(warned) == 1  # not once for every layer
        assert same(step(), want)
        assert any("key-value cache" in line for line in report.gradients)
        with torch.no_grad():
            assert torch.equal(model(input_ids=words, labels=words).loss, want[0])
