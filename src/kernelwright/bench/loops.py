"""Times denoising loops with and without diffusers' First Block Cache.

The cache skips the other blocks of a step when the first block's output hardly changed. "exact"
must give the bits of the same loop without injection, with or without the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import models, place
from ..close_names import suggestion
from ..errors import BadSetting
from ..library_internals import diffusers_hooks, reset_cache
from ..measure import results
from ..measure.configs import configured
from ..measure.results import environment_of
from ..measure.timing import milliseconds, wait
from .models import Wrong, _fresh, _memory, _sizes

CONFIGS = ("eager", "cache", "exact", "exact+graphs", "exact+cache", "exact+graphs+cache")
PRESETS = ("ltx-video", "flux-dev")
CONTEXT = "cond"


class Loop:
    """Denoises one prompt with Euler's method, always from the same noise."""

    def __init__(self, model: Any, inputs: dict[str, Any], steps: int) -> None:
        self.model, self.inputs, self.steps = model, inputs, steps
        self.skipped = 0  # steps of the last run that ended after the first block

    def __call__(self) -> Tensor:
        cached = self.model.is_cache_enabled
        if cached:
            reset_cache(self.model)
        self.skipped = 0
        latents, whole = self.inputs["hidden_states"], self.inputs["timestep"]
        for step in range(self.steps):
            given = {**self.inputs, "hidden_states": latents, "timestep": whole * self._left(step)}
            with self.model.cache_context(CONTEXT) if cached else nullcontext():
                velocity = self.model(**given)[0]
                self.skipped += cached and not first_block(self.model).should_compute
            latents = latents - velocity / self.steps
        return latents

    def _left(self, step: int) -> float:
        return 1 - step / self.steps


def first_block(model: nn.Module) -> Any:
    """The cache's state of the current loop, with the decision of the last step."""
    for module in model.modules():
        hook = (diffusers_hooks(module) or {}).get("fbc_leader_block_hook")
        if hook is not None:
            return hook.state_manager.get_state()
    raise ValueError(f"{type(model).__name__} has no first block that a cache could watch")


def measure(
    preset: str,
    configs: Sequence[str] = CONFIGS,
    *,
    steps: int = 30,
    threshold: float = 0.1,
    tiny: bool = False,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
    **sizes: int,
) -> Iterator[dict[str, Any]]:
    """One row a configuration: milliseconds a loop, how many steps were skipped, and whether the
    result has the bits of the same loop without injection."""
    build: dict[str, Any] = {"tiny": tiny, "device": device, "dtype": dtype}
    model = models.build(preset, **build)
    loop = Loop(model, models.inputs(preset, **{**build, **sizes}), steps)
    plain: dict[bool, Tensor] = {}
    with torch.no_grad():
        for config in configs:
            row: dict[str, Any] = {
                "model": preset,
                "tiny": tiny,
                "sizes": {**_sizes(preset, tiny), **sizes, "steps": steps},
                "dtype": str(dtype).removeprefix("torch."),
                "config": config,
            }
            try:
                row |= _measure(loop, config, threshold, plain, seconds)
            except Exception as error:
                name = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
                row["failed"] = f"{name}{str(error).partition(chr(10))[0]}"
            yield row


def _measure(
    loop: Loop, config: str, threshold: float, plain: dict[bool, Tensor], seconds: float
) -> dict[str, Any]:
    cached = "cache" in config.split("+")
    if cached not in plain:
        with ExitStack() as stack:
            _cache(loop.model, threshold if cached else None, stack)
            plain[cached] = loop()
    _fresh()
    with ExitStack() as stack:
        begin = time.perf_counter()
        _, report = configured(loop.model, config, stack)
        _cache(loop.model, threshold if cached else None, stack)
        first = loop()
        wait()
        row: dict[str, Any] = {"first_s": time.perf_counter() - begin, "error": None}
        row["equal"] = torch.equal(first, plain[cached]) and torch.equal(loop(), plain[cached])
        if cached:
            row |= {"threshold": threshold, "skipped": loop.skipped}
        if not row["equal"]:
            other = "the cache alone" if cached else "eager"
            raise Wrong(f"{config}: not the bits of {other}")
        if report is not None:
            row["replaced"] = report.replaced
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = report.graph_lines
        _fresh()
        row["ms"] = milliseconds(loop, seconds)
        return row | _memory("steady_")


def _cache(model: Any, threshold: float | None, stack: ExitStack) -> None:
    """Enable First Block Cache until the stack closes."""
    if threshold is not None:
        from diffusers import FirstBlockCacheConfig

        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        stack.callback(model.disable_cache)


def run(
    presets: Sequence[str],
    configs: Sequence[str],
    *,
    steps: int,
    threshold: float,
    tiny: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    seconds: float = 2.0,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure presets in turn; writes the rows so far to `out` after each."""
    if unknown := [c for c in configs if c not in CONFIGS]:
        near = suggestion(unknown[0], CONFIGS, "kernelwright bench loop --help")
        raise BadSetting("--config", f"no configuration {unknown[0]!r}; {near}")
    if unknown := [p for p in presets if p not in PRESETS]:
        near = suggestion(unknown[0], PRESETS, "kernelwright models")
        raise ValueError(f"no loop for {unknown[0]!r}; {near}")
    if out is not None:
        results.check_writable(out)
    at = place.choose_device(device, tiny=tiny)
    rows: list[dict[str, Any]] = []
    with torch.cuda.device(at) if at.type == "cuda" else nullcontext():
        for name in presets or PRESETS:
            for row in measure(
                name,
                configs,
                steps=steps,
                threshold=threshold,
                tiny=tiny,
                device=str(at),
                dtype=place.choose_dtype(dtype, at),
                seconds=seconds,
            ):
                rows.append(row | {"device": at.type})
                if out is not None:
                    results.write(out, "models", rows, environment=environment_of(at))
            _fresh()
    return rows
