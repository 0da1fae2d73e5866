"""Caches that skip work between denoising steps keep state on the modules: an injected model with
such a cache gives the bits of the same cache without injection."""

import functools
from contextlib import nullcontext

import diffusers
import pytest
import torch
from everything import share

import kernelwright as kw
from kernelwright import models

from .tape import graphs_on_the_cpu

STEPS = 6
MODELS = ("ltx-video", "flux-dev", "wan-1.3b")


class Clock:
    """The timestep, as caches read it."""

    now = 900


def pyramid(**how):
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 950),
        current_timestep_callback=lambda: Clock.now,
        **how,
    )


def faster():
    return diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 850),
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 850),
        attention_weight_callback=lambda module: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: Clock.now,
    )


def cross_attention():
    return pyramid(
        cross_attention_block_skip_range=3, cross_attention_timestep_skip_range=(-1, 950)
    )


def taylor():
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=1,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r".*blocks\.\d+\.attn1?"],
    )


def magnitudes():
    return diffusers.MagCacheConfig(
        threshold=0.5, retention_ratio=0.1, num_inference_steps=STEPS, mag_ratios=[0.99] * STEPS
    )


CACHES = {
    "first block": lambda: diffusers.FirstBlockCacheConfig(threshold=0.5),
    "pyramid": pyramid,
    "pyramid, cross-attention too": cross_attention,
    "faster": faster,
    "taylor": taylor,
    "magnitudes": magnitudes,
}


def built(name, layers=None):
    how = {"tiny": True, "dtype": torch.float32}
    return models.build(name, **how, layers=layers), models.inputs(name, **how)


@torch.no_grad()
def denoised(model, inputs, contexts=("cond",), steps=STEPS):
    """The results of a loop in which each step starts from the result of the last."""
    latents, results = inputs["hidden_states"], []
    for step in range(steps):
        Clock.now = 900 - 100 * step
        for context in contexts:
            given = {**inputs, "hidden_states": latents}
            given["timestep"] = inputs["timestep"] * (1 - step / 40)
            around = model.cache_context(context) if hasattr(model, "cache_context") else None
            with around or nullcontext():
                results.append(model(**given)[0])
        latents = latents - 0.05 * results[-1]
    return results


def same(got, want):
    """Which of the results have the bits of those at the same step."""
    return [torch.equal(a, b) for a, b in zip(got, want, strict=True)]


@functools.cache
def without_cache(name):
    return denoised(*built(name))


@functools.cache
def expected(name, cache):
    """The results of a model without the cache and with it."""
    model, inputs = built(name)
    plain = without_cache(name)
    model.enable_cache(CACHES[cache]())
    want = denoised(model, inputs)
    assert not all(same(want, plain)), "the cache skips nothing"
    return plain, want


def taking_turns(caches):
    """Each cache of each model, with graphs and without, enabled before the injection and after
    it, in turns."""
    pairs = enumerate((name, cache) for name in MODELS for cache in caches)
    ways = (("before", False), ("before", True), ("after", True), ("after", False))
    return [(*pair, *way) for turn, pair in pairs for way in share(ways, 4, start=turn)]


@pytest.mark.compatibility(
    "First Block Cache", "Pyramid Attention Broadcast", "FasterCache", "TaylorSeer", "MagCache"
)
@pytest.mark.parametrize(("name", "cache", "when", "graphs"), taking_turns(CACHES))
def test_a_cache_gives_its_own_bits_in_an_injected_model(name, cache, when, graphs):
    plain, want = expected(name, cache)
    model, inputs = built(name)
    with graphs_on_the_cpu() if graphs else nullcontext():
        if when == "after":
            model.enable_cache(CACHES[cache]())
        kw.inject(model, graphs=graphs)
        if when == "before":
            model.enable_cache(CACHES[cache]())
        assert all(same(denoised(model, inputs), want))
        model.disable_cache()
        assert all(same(denoised(model, inputs, steps=2), plain[:2]))


@pytest.mark.compatibility(
    "First Block Cache", "Pyramid Attention Broadcast", "FasterCache", "TaylorSeer", "MagCache"
)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_gives_its_own_bits_with_programs(cache):
    plain, want = expected("ltx-video", cache)
    model, inputs = built("ltx-video")
    kw.inject(model, recipes=False)
    model.enable_cache(CACHES[cache]())
    assert all(same(denoised(model, inputs), want))
    model.disable_cache()
    assert all(same(denoised(model, inputs, steps=2), plain[:2]))


@pytest.mark.parametrize("name", MODELS)
def test_two_prompts_keep_their_caches_apart(name):
    model, inputs = built(name)
    model.enable_cache(CACHES["first block"]())
    want = denoised(model, inputs, ("cond", "uncond"))
    model.disable_cache()
    kw.inject(model)
    model.enable_cache(CACHES["first block"]())
    assert all(same(denoised(model, inputs, ("cond", "uncond")), want))


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_is_reset_starts_again(cache):
    """A second generation after `_reset_stateful_cache`, as pipelines do between two calls."""
    model, inputs = built("flux-dev")
    model.enable_cache(CACHES[cache]())
    want = [denoised(model, inputs)]
    model._reset_stateful_cache()
    want.append(denoised(model, inputs))
    model.disable_cache()
    kw.inject(model)
    model.enable_cache(CACHES[cache]())
    for each in want:
        assert all(same(denoised(model, inputs), each))
        model._reset_stateful_cache()


def hooks(model, kind):
    """The hooks of this class in a model, by module."""
    found = {}
    for name, module in model.named_modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if type(hook).__name__ == kind:
                found[name] = hook
    return found


@pytest.mark.parametrize(
    ("cache", "kind"),
    [("pyramid", "PyramidAttentionBroadcastHook"), ("faster", "FasterCacheBlockHook")],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_attention_counts_one_iteration_a_step(name, cache, kind):
    model, inputs = built(name)
    model.enable_cache(CACHES[cache]())
    kw.inject(model)
    for steps in (1, 2, 3):
        denoised(model, inputs, steps=1)
        counts = {n: hook.state.iteration for n, hook in hooks(model, kind).items()}
        assert set(counts.values()) == {steps}, counts


def test_a_cache_keeps_nothing_after_a_reset():
    model, inputs = built("flux-dev")
    model.enable_cache(CACHES["faster"]())
    kw.inject(model)
    denoised(model, inputs, steps=3)
    blocks = hooks(model, "FasterCacheBlockHook")
    assert blocks
    assert all(hook.state.cache is not None for hook in blocks.values())
    model._reset_stateful_cache()
    assert all(hook.state.iteration == 0 for hook in blocks.values())
    assert all(hook.state.cache is None for hook in blocks.values())


def test_attention_that_is_broadcast_is_not_computed():
    """Two of three steps reuse the last attention: its processor runs in only one step."""
    model, inputs = built("ltx-video")
    calls = []

    class Counts:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *args, **kwargs):
            calls.append(1)
            return self.inner(*args, **kwargs)

    for block in model.transformer_blocks:
        block.attn1.processor = Counts(block.attn1.processor)
    model.enable_cache(
        diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=3,
            spatial_attention_timestep_skip_range=(-1, 950),
            current_timestep_callback=lambda: Clock.now,
        )
    )
    counted = []
    kw.inject(model)
    for _ in range(6):
        calls.clear()
        denoised(model, inputs, steps=1)
        counted.append(len(calls))
    blocks = len(model.transformer_blocks)
    assert counted == [blocks, 0, 0, blocks, 0, 0]


class Special:
    """A custom processor that counts its calls."""

    def __init__(self, inner, seen, name):
        self.inner, self.seen, self.name = inner, seen, name

    def __call__(self, attn, *args, **kwargs):
        self.seen.append(self.name)
        return self.inner(attn, *args, **kwargs)


# before or after the injection
SPECIAL = [("sdxl-unet", "after"), ("sdxl-unet", "before"), ("ltx-video", "before")]
SPECIAL += [("ltx-video", "after"), ("flux-dev", "after"), ("flux-dev", "before")]
SPECIAL += [("sd3.5-medium", "before"), ("sd3.5-medium", "after"), ("pixart", "after")]
SPECIAL += [("pixart", "before")]


@pytest.mark.parametrize(("name", "when"), share(SPECIAL, 2))
def test_a_special_attention_processor_is_called_once_a_forward(name, when):
    model, inputs = built(name, layers=1)
    seen = []
    if when == "before":
        kw.inject(model)
        model(**inputs)
    places = [n for n, m in model.named_modules() if getattr(m, "processor", None) is not None]
    for place in places:
        module = model.get_submodule(place)
        module.processor = Special(module.processor, seen, place)
    if when == "after":
        kw.inject(model)
    for _ in range(2):
        seen.clear()
        model(**inputs)
        assert sorted(seen) == sorted(places)
