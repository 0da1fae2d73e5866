"""cache-dit replaces the blocks of a model during a call: injected, the same bits."""

import functools
from contextlib import nullcontext

import pytest

import kernelwright as kw

from .tape import graphs_on_the_cpu
from .test_caches import STEPS, built, denoised, same, taking_turns, without_cache

cache_dit = pytest.importorskip("cache_dit")


def enable(model, calibrator=None):
    cache_dit.enable_cache(
        model,
        cache_config=cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            residual_diff_threshold=0.6,
            max_warmup_steps=1,
            num_inference_steps=STEPS,
        ),
        calibrator_config=calibrator,
    )


CALIBRATORS = {
    "residuals": lambda: None,
    "taylor": lambda: cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1),
}


@functools.cache
def expected(name, calibrator):
    model, inputs = built(name)
    enable(model, CALIBRATORS[calibrator]())
    want = denoised(model, inputs)
    assert not all(same(want, without_cache(name))), "the cache skips nothing"
    return want


@pytest.mark.compatibility("cache-dit")
@pytest.mark.parametrize(("name", "calibrator", "when", "graphs"), taking_turns(CALIBRATORS))
def test_cache_dit_gives_its_own_bits_in_an_injected_model(name, calibrator, when, graphs):
    want, plain = expected(name, calibrator), without_cache(name)
    model, inputs = built(name)
    with graphs_on_the_cpu() if graphs else nullcontext():
        if when == "after":
            enable(model, CALIBRATORS[calibrator]())
        kw.inject(model, graphs=graphs)
        if when == "before":
            enable(model, CALIBRATORS[calibrator]())
        assert all(same(denoised(model, inputs), want))
        cache_dit.disable_cache(model)
        assert all(same(denoised(model, inputs, steps=2), plain[:2]))
