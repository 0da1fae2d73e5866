"""Whatever is done to an injected model has the same effect as on a model that is not injected.

KERNELWRIGHT_FUZZ_STEPS=500 lengthens the sequences, KERNELWRIGHT_FUZZ_SEED=7 draws others; a
failure prints a line for `mutations.replay`.
"""

import os
import random
import warnings

import everything
import pytest
from everything import EVERYTHING

from kernelwright.inject.fp8 import resting

from . import mutations
from .tape import graphs_on_the_cpu

pytest.importorskip("diffusers")

STEPS = int(os.environ.get("KERNELWRIGHT_FUZZ_STEPS", "10"))
SEED = int(os.environ.get("KERNELWRIGHT_FUZZ_SEED", "0"))
# the families that have recipes, SDXL's UNet among them: half of them, others by another seed
PRESETS = ("ltx-video", "wan-1.3b", "flux-dev", "sd3.5-medium", "pixart", "dit-xl", "sdxl-unet")
PRESETS += ("llama-3-8b", "mistral-7b", "qwen3-8b", "falcon-7b")
# and three that have none
IN_A_ROW = (*everything.share(PRESETS, 2, start=SEED), "flux2-dev", "z-image", "gemma-3-12b")
# one of each structure: attention to a text, joint attention, a language model, a UNet
STRUCTURES = ("ltx-video", "flux-dev", "llama-3-8b", "sdxl-unet")
SLOWER = {"sdxl-unet": 3, "sd3.5-medium": 2}
# on a CPU without bfloat16 a convolution takes thirty times as long in it
HALF = {"life.dtype", "calls.autocast"}
TIERS = [("fused", "ltx-video"), ("fused", "flux-dev"), ("fp8", "ltx-video")]
TIERS += [("fused", "llama-3-8b"), ("fp8", "llama-3-8b")]


def share(preset):
    """How many steps, and of which kinds."""
    kinds = [k for k in (*mutations.KINDS, mutations.UNDO) if k not in HALF or "unet" not in preset]
    return STEPS // SLOWER.get(preset, 1), kinds


@pytest.fixture(scope="module")
def tally():
    kept = mutations.Tally()
    yield kept
    print(f"\n{kept}")


@pytest.fixture(autouse=True)
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("kind", [k for k, v in mutations.KINDS.items() if not v.on_gpu])
def test_a_change_after_the_first_calls_is_followed(kind, tally):
    # on one of them, another one from kind to kind, and on all but the UNet if everything was asked
    # for; on the UNet only if no other does it
    number = list(mutations.KINDS).index(kind)
    *structures, last = STRUCTURES
    turn = number % len(structures)
    tried = 0
    for preset in (*structures[turn:], *structures[:turn]):
        tried += mutations.alone(preset, kind, number, tally)
        if tried and not EVERYTHING:
            return
    if not tried and not mutations.alone(last, kind, number, tally):
        pytest.skip("eager does not do this here")


# what a graph bakes in: numbers, functions and modules that Python reads
BAKED = [
    ("ltx-video", "parts.eps of all norms"),
    ("ltx-video", "parts.an activation swapped"),
    ("ltx-video", "parts.class patched: norm"),
    ("flux-dev", "parts.the __call__ of a processor class patched"),
    ("flux-dev", "calls.float32 precision"),
    ("ltx-video", "calls.a switch of attention"),
    ("llama-3-8b", "parts.an attribute of attention"),
    ("llama-3-8b", "hooks.global forward pre-hook"),
    ("sdxl-unet", "life.freeu"),
]


@pytest.mark.parametrize(("preset", "kind"), BAKED)
def test_a_change_after_the_capture_is_followed(preset, kind, tally):
    with graphs_on_the_cpu():
        assert mutations.alone(preset, kind, 0, tally, graphs=True)


# sequences that once failed in a longer run, and that a short run is unlikely to draw
FOUND = [
    # offload leaves parameters without an address
    ("ltx-video", [("life.sequential offload", 3), ("calls.torch.func.grad", 3)]),
    # a hook two levels below a block, whose first norm ran in the block before it and then again
    (
        "ltx-video",
        [
            ("hooks.forward hook that looks on", 758192),
            ("inject", 0),
            ("parts.a norm of another class", 916819),
        ],
    ),
    # a class whose forward is not called "forward"
    (
        "ltx-video",
        [("parts.class patched: attention", 151387), ("inject", 0), ("life.pickle", 277282)],
    ),
    # gradients are asked for where inference mode records none
    ("llama-3-8b", [("inject", 0), ("calls.inference_mode", 0), ("calls.gradients", 0)]),
]


@pytest.mark.parametrize(("preset", "steps"), FOUND)
def test_what_failed_once_does_not_again(preset, steps):
    with graphs_on_the_cpu():
        mutations.replay(preset, steps, graphs=True)


@pytest.mark.parametrize("preset", IN_A_ROW)
def test_changes_in_a_row_leave_the_bits_of_eager(preset, tally, record_property):
    mutations.sequence(preset, SEED, *share(preset), tally)
    record_property("fuzz", str(tally))


@pytest.mark.parametrize("preset", STRUCTURES)
def test_changes_in_a_row_are_followed_by_graphs(preset, tally):
    with graphs_on_the_cpu():
        mutations.sequence(preset, SEED, *share(preset), tally, graphs=True)


@pytest.mark.parametrize(("numerics", "preset"), TIERS)
def test_changes_in_a_row_leave_nothing_stale(numerics, preset, tally, monkeypatch):
    """The same as a model in the same state that is injected only now."""
    # now and then a weight was put on the CPU by the change, and stays there
    draw = random.Random(SEED)
    monkeypatch.setattr(resting, "leaves_gpu", lambda weight: draw.random() < 0.8)
    mutations.sequence(preset, SEED, STEPS // 2, tally=tally, numerics=numerics)
