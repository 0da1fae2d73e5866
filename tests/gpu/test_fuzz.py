"""Thousands of changes of injected models on a GPU, with graphs, against twins that have none.

KERNELWRIGHT_FUZZ_SECONDS is the time for each model (60), KERNELWRIGHT_FUZZ_SEED the first seed.
KERNELWRIGHT_FUZZ_REPLAY is a file for the line that repeats the step under way: if the GPU crashes,
nothing else says which one it was. KERNELWRIGHT_FUZZ_TALLY is a file to which each model adds its
counts.
"""

import os
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from inject import mutations

pytest.importorskip("diffusers")
pytestmark = pytest.mark.gpu

SECONDS = float(os.environ.get("KERNELWRIGHT_FUZZ_SECONDS", "60"))
SEED = int(os.environ.get("KERNELWRIGHT_FUZZ_SEED", "0"))
TALLY = os.environ.get("KERNELWRIGHT_FUZZ_TALLY")
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16}


def fuzzed(preset, seconds, steps=12, **how):
    """Sequences until the time is over; a difference ends its sequence, not the search."""
    tally, seed = mutations.Tally(), SEED
    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while time.monotonic() < end:
            with suppress(mutations.Differs):
                mutations.sequence(preset, seed, steps, tally=tally, **ON_GPU, **how)
            seed += 1
    counts = f"{preset} {how}: {tally}"
    print(f"\n{counts}")
    if TALLY:
        with Path(TALLY).open("a") as file:
            file.write(f"{counts}\n")
    for replay, what in tally.differences[:20]:
        print(f"{what}\n    {replay}")
    assert tally.steps
    assert not tally.differences, f"{len(tally.differences)} in {tally.steps} steps"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", ""])
@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev", "sdxl-unet", "llama-3-8b"])
def test_changes_in_a_row_leave_the_bits_of_eager(preset, graphs):
    fuzzed(preset, SECONDS if graphs else SECONDS / 3, graphs=graphs)


@pytest.mark.parametrize("numerics", ["fused", "fp8"])
@pytest.mark.parametrize("preset", ["ltx-video", "flux-dev", "llama-3-8b"])
def test_changes_in_a_row_leave_nothing_stale(preset, numerics):
    fuzzed(preset, SECONDS / 3, numerics=numerics)


@pytest.mark.slow
def test_changes_of_a_model_of_full_size():
    fuzzed("ltx-video", SECONDS / 2, graphs=True, tiny=False)
