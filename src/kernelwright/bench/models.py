"""Times one forward of whole models: eager, torch.compile, injected, and combinations.

A time is taken only after the result was compared with eager: "exact" must give its bits; the error
of "fused" against a float32 run of the same weights must not be above eager's.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from .. import models, place
from ..backends.torch_internals import pytree
from ..errors import CannotRun
from ..inject.runtime.sites import equal
from ..inject.verify import accuracy
from ..measure import results
from ..measure.configs import CONFIGS, configured, tier_of
from ..measure.results import environment_of
from ..measure.timing import milliseconds, wait
from ..profiling.categories import split
from ..profiling.record import record
from . import first_result


class Wrong(AssertionError):
    """The result is not what the configuration promises, so it is not timed."""


class Unavailable(Exception):
    """A configuration that cannot run here; the message says why."""


def measure(
    preset: str,
    configs: Sequence[str] = CONFIGS,
    *,
    tiny: bool = False,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
    with_error: bool = True,
    first_of: Sequence[str] = (),
    **sizes: int,
) -> Iterator[dict[str, Any]]:
    """One row a configuration: milliseconds a forward, memory, seconds to the first result.

    For the configurations `first_of`, the first result is also timed in new processes, with cold
    and with warm caches. A configuration that fails gets a row too, and the next ones still run.
    """
    build: dict[str, Any] = {"tiny": tiny, "device": device, "dtype": dtype}
    model = models.build(preset, **build)
    inputs = models.inputs(preset, **{**build, **sizes})
    with torch.no_grad():
        expected = model(**inputs)
        truth = _truth(model, inputs) if with_error else None
        eager_error = accuracy.error(expected, truth) if with_error else None
        for config in configs:
            row = {
                "model": preset,
                "tiny": tiny,
                "sizes": {**_sizes(preset, tiny), **sizes},
                "dtype": str(dtype).removeprefix("torch."),
                "config": config,
            }
            try:
                row |= _measure(model, inputs, config, expected, truth, eager_error, seconds)
                if config in first_of:
                    row |= first_result.cold_and_warm(preset, config, sizes=sizes, **build)
            except Wrong as wrong:
                row["failed"] = str(wrong)
            except Unavailable as no:
                row |= {"failed": str(no), "unavailable": True}
            except CannotRun as no:
                row["first_problem"] = str(no)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            yield row


def _measure(
    model: nn.Module,
    inputs: dict[str, Any],
    config: str,
    expected: Any,
    truth: Any,
    eager_error: float | None,
    seconds: float,
) -> dict[str, Any]:
    tier = tier_of(config)
    _fresh()
    with ExitStack() as stack:
        begin = time.perf_counter()
        try:
            run, report = configured(model, config, stack)
        except (ValueError, CannotRun) as no:
            raise Unavailable(str(no)) from None
        result = run(**inputs)
        wait()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        result = run(**inputs)  # graphs are captured here
        wait()
        second = time.perf_counter() - begin
        result = run(**inputs)
        row: dict[str, Any] = {
            "equal": equal(result, expected),
            "error": None if truth is None else accuracy.error(result, truth),
            "eager_error": eager_error,
            "first_s": first,
            "second_s": second,
        }
        _check(config, tier, row, accuracy.rows(expected))
        del result
        if report is not None:
            row["replaced"] = report.replaced
            row["sites"] = report.sites
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = [g.describe() for g in report.graphs]
        row |= _memory()
        _fresh()
        row["ms"] = milliseconds(lambda: run(**inputs), seconds)
        row |= _memory("steady_")
        if (device := _device(inputs)).type == "cuda":
            row["split"] = split(record(lambda: run(**inputs), device))
    return row


def _device(inputs: dict[str, Any]) -> torch.device:
    return next(t.device for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))


def _check(config: str, tier: str | None, row: dict[str, Any], rows: int) -> None:
    """Raise Wrong if the result breaks its promise; torch.compile makes no promise about bits."""
    if tier == "exact" and "compile" not in config and not row["equal"]:
        raise Wrong(f"{config}: not the bits of eager")
    if tier == "fused" and not accuracy.holds(rows, row["error"], row["eager_error"]):
        raise Wrong(f"{config}: error {row['error']:.3e}, eager's is {row['eager_error']:.3e}")


def _truth(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The result of the same weights in float32."""
    twin = nn.Module.float(copy.deepcopy(model))
    truth = twin(**accuracy.widened(inputs))
    del twin
    _fresh()
    return truth


def _fresh() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory(when: str = "") -> dict[str, float]:
    """Peak memory since `_fresh`: allocated to tensors, and reserved, which includes the pools of
    graphs. The first calls include verification and capture, "steady_" does not."""
    if not torch.cuda.is_available():
        return {}
    return {
        f"{when}peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        f"{when}reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def _sizes(preset: str, tiny: bool) -> dict[str, int]:
    found = models.presets()[preset]
    return dict(found.tiny_sizes if tiny else found.sizes)


def run(
    presets: Sequence[str],
    configs: Sequence[str],
    sizes: dict[str, int],
    *,
    tiny: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    seconds: float = 2.0,
    with_error: bool = True,
    first_of: Sequence[str] = (),
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure presets, by default all, in turn; writes the rows so far to `out` after each."""
    for config in configs:
        if config not in CONFIGS:
            raise ValueError(f"no configuration {config!r}, expected any of {', '.join(CONFIGS)}")
    if unknown := set(first_of) - set(configs):
        raise ValueError(f"--first {', '.join(sorted(unknown))}: not among --config")
    names = list(presets) or list(models.presets())
    given: dict[str, Any] = {"tiny": tiny, **sizes}
    for name in names:  # fail before hours of work
        models.inputs(name, **given)
    if out is not None:
        results.check_writable(out)
    at = place.choose_device(device, tiny=tiny)
    how: dict[str, Any] = {"device": str(at), "dtype": place.choose_dtype(dtype, at), **given}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if at.type == "cuda":
            stack.enter_context(torch.cuda.device(at))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("timing", total=len(names) * len(configs))
        for name in names:
            for row in measure(
                name, configs, seconds=seconds, with_error=with_error, first_of=first_of, **how
            ):
                rows.append(row)
                progress.advance(task)
                if out is not None:
                    results.write(out, "models", rows, environment=environment_of(at))
            _fresh()
    return rows
