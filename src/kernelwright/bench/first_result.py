"""Seconds to the first result of a model, with an empty and with a warm cache of kernels.

Each is measured in a process of its own, `python -m kernelwright.bench.first_result PRESET`: it
builds the model, then times everything from `inject` to the end of the first forward, and then the
first four forwards at another size. Of these `exact` runs the first as it is, compares in the
second, and tries what it does across blocks in the third.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .. import models
from ..errors import CannotRun
from ..measure.configs import configured

# how to make another size of a preset: the first of these that it has, and what to add to it
OTHER = {"frames": 8, "tokens": 64, "width": 64, "batch": 1}

OTHERS = ("other_first_s", "other_second_s", "other_third_s", "other_fourth_s")

# every cache in which a first forward could find kernels of an earlier run
CACHES = {
    "KERNELWRIGHT_CACHE": "kernelwright",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def cold_and_warm(
    preset: str,
    config: str,
    *,
    tiny: bool,
    device: str,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    layers: int | None = None,
) -> dict[str, float]:
    """`cold_s` with empty caches; `warm_s` with the caches of that run, and `other_first_s` to
    `other_fourth_s` of the same process at another size."""
    command = [
        *(sys.executable, "-m", "kernelwright.bench.first_result", preset, "--config", config),
        *("--device", device, "--dtype", str(dtype).removeprefix("torch.")),
        *(["--tiny"] if tiny else []),
        *(["--layers", str(layers)] if layers is not None else []),
        *(["--size", *(f"{n}={v}" for n, v in sizes.items())] if sizes else []),
    ]
    with tempfile.TemporaryDirectory(prefix="kernelwright-first-") as folder:
        caches = {name: str(Path(folder, part)) for name, part in CACHES.items()}
        cold, warm = (_in_a_process(command, caches) for _ in range(2))
    return {"cold_s": cold.pop("first_s"), "warm_s": warm.pop("first_s"), **warm}


def _in_a_process(command: list[str], caches: dict[str, str]) -> dict[str, float]:
    ran = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"]
        raise CannotRun(f"the first forward in a process of its own failed: {said[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def first_seconds(
    preset: str,
    config: str,
    *,
    tiny: bool,
    device: str,
    dtype: torch.dtype,
    layers: int | None = None,
    **sizes: int,
) -> dict[str, float]:
    """Seconds of `inject` and the first forward of a new model; then of each of the first four
    forwards at another size."""
    build: dict[str, Any] = {"tiny": tiny, "device": device, "dtype": dtype}
    model = models.build(preset, layers=layers, **build)
    inputs = models.inputs(preset, **{**build, **sizes})
    found = models.presets()[preset]
    known = {**(found.tiny_sizes if tiny else found.sizes), **sizes}
    name = next(name for name in OTHER if name in known)
    more = math.ceil(OTHER[name] / found.frames) * found.frames if name == "frames" else OTHER[name]
    other: dict[str, Any] = {**build, **known, name: known[name] + more}
    others = models.inputs(preset, **other)
    gpu = torch.device(device).type == "cuda"
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if gpu:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run, _ = configured(model, config, stack)
        for label in ("first_s", *OTHERS):
            run(**(others if label in OTHERS else inputs))
            if gpu:
                torch.cuda.synchronize()
            seconds[label] = time.perf_counter() - begin
            begin = time.perf_counter()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--config", default="eager")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N")
    args = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (s.partition("=") for s in args.size)}
    how: dict[str, Any] = {"tiny": args.tiny, "device": args.device, "layers": args.layers, **sizes}
    seconds = first_seconds(args.preset, args.config, dtype=getattr(torch, args.dtype), **how)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
