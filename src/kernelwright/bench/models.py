"""Times one forward of whole models: eager, torch.compile, injected, and combinations.

A time is taken only after the result was compared with eager: "exact" must give its bits; the error
of "fused" against a float32 run of the same weights must not be above eager's.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from .. import models, place
from ..backends.torch_internals import pytree
from ..close_names import suggestion
from ..errors import BadSetting, CannotRun
from ..inject.runtime.sites import equal
from ..inject.verify import accuracy
from ..measure import results, turns
from ..measure.configs import CONFIGS, Compilation, configured, tier_of
from ..measure.results import environment_of
from ..measure.timing import milliseconds, wait
from ..models.catalog import preset as preset_named
from ..profiling.categories import largest_others, split
from ..profiling.record import record
from . import first_result, latents


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
    layers: int | None = None,
    with_latents: bool = False,
    **sizes: int,
) -> Generator[dict[str, Any]]:
    """One row a configuration: milliseconds a forward, memory, seconds to the first result.

    For the configurations `first_of`, the first result is also timed in new processes, with cold
    and with warm caches. A configuration that fails gets a row too, and the next ones still run; of
    a model that cannot be built or run, every configuration gets a row with the reason. `layers`
    builds at most so many of each kind of block. `with_latents` also denoises in STEPS steps, and
    compares the last latents with eager's.
    """
    place: dict[str, Any] = {"tiny": tiny, "device": device, "dtype": dtype}
    build = {**place, "layers": layers}
    rows = [_row(preset, config, tiny, dtype, layers, sizes) for config in configs]
    with torch.no_grad(), closing(Compilation()) as compilation:
        try:
            model = models.build(preset, **build)
            inputs = models.inputs(preset, **{**place, **sizes})
            expected = model(**inputs)
        except Exception as error:
            yield from (row | {"failed": f"the model: {_reason(error)}"} for row in rows)
            return
        try:
            truth = _truth(model, inputs) if with_error else None
        except torch.OutOfMemoryError:  # it needs three times the memory
            truth = None
        denoised = None
        if with_latents and latents.denoises(inputs):
            denoised = latents.last_latents(model, inputs)
        eager_error = None if truth is None else accuracy.error(expected, truth)
        for row in rows:
            config = row["config"]
            try:
                known = expected, truth, eager_error
                row |= _measure(model, inputs, config, compilation, *known, seconds, denoised)
                if config in first_of:
                    row |= first_result.cold_and_warm(preset, config, sizes=sizes, **build)
            except Wrong as wrong:
                row["failed"] = str(wrong)
            except Unavailable as no:
                row |= {"failed": str(no), "unavailable": True}
            except CannotRun as no:
                row["first_problem"] = str(no)
            except Exception as error:
                row["failed"] = _reason(error)
            yield row


def _row(
    preset: str,
    config: str,
    tiny: bool,
    dtype: torch.dtype,
    layers: int | None,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """What a row says before anything is measured."""
    # among the sizes, so that a report never takes a few layers for the whole model
    depth = {} if layers is None else {"layers": layers}
    return {
        "model": preset,
        "tiny": tiny,
        "sizes": {**_sizes(preset, tiny), **sizes, **depth},
        "dtype": str(dtype).removeprefix("torch."),
        "config": config,
    }


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _measure(
    model: nn.Module,
    inputs: dict[str, Any],
    config: str,
    compilation: Compilation,
    expected: Any,
    truth: Any,
    eager_error: float | None,
    seconds: float,
    denoised: Tensor | None = None,
) -> dict[str, Any]:
    tier = tier_of(config)
    _fresh()
    with ExitStack() as stack:
        begin = time.perf_counter()
        try:
            run, report = configured(model, config, stack, compilation=compilation)
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
            "differing": differing_share(result, expected),
            "error": None if truth is None else accuracy.error(result, truth),
            "eager_error": eager_error,
        }
        # not if others ran meanwhile, or a part of it was done before
        if not (turns.taken() or compilation.reused):
            row |= {"first_s": first, "second_s": second}
        _check(config, tier, row, accuracy.rows(expected))
        del result
        if denoised is not None and not row["equal"]:
            row |= _latents(run, inputs, config, denoised)
        if report is not None:
            row["replaced"] = report.replaced
            row["sites"] = report.sites
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = report.graph_lines
            if report.not_in_fp8:
                row["not_in_fp8"] = report.not_in_fp8
        elif (graphs := getattr(run, "graph_lines", None)) is not None:
            row["graphs"] = graphs
        # a peer's copy of the model stands beside the model
        own = "torchao" not in config.split("+")
        row |= _memory() if own else {}
        _fresh()
        row["ms"] = milliseconds(lambda: run(**inputs), seconds)
        row |= _memory("steady_") if own else {}
        if (device := _device(inputs)).type == "cuda":
            with turns.alone():
                kernels = record(lambda: run(**inputs), device)
            row["split"], row["others"] = split(kernels), largest_others(kernels)
    return row


def _latents(
    run: Any, inputs: dict[str, Any], config: str, denoised: Tensor
) -> dict[str, float | None]:
    """PSNR of the last latents of a whole run against eager's."""
    if "compile" in config and "graphs" in config:
        return {}  # such a graph replays one set of inputs
    return {"psnr": latents.psnr(latents.last_latents(run, inputs), denoised)}


def _device(inputs: dict[str, Any]) -> torch.device:
    return next(t.device for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))


def differing_share(result: Any, expected: Any) -> float | None:
    """The share of a result's elements that are not eager's; None if it has other shapes. NaN is
    equal to NaN."""
    pairs = list(zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True))
    tensors = [(r, e) for r, e in pairs if isinstance(r, Tensor) and isinstance(e, Tensor)]
    if any(r.shape != e.shape for r, e in tensors):
        return None
    elements = sum(e.numel() for _, e in tensors)
    off = sum(int(((r != e) & ~(r.isnan() & e.isnan())).sum()) for r, e in tensors)
    return off / max(1, elements)


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
    layers: int | None = None,
    minutes: float | None = None,
    with_latents: bool = False,
) -> list[dict[str, Any]]:
    """Measure presets, by default all, in turn; writes the rows so far to `out` after each.

    A preset that fails does not end the run. After `minutes` nothing more is started: what is left
    out gets rows that say so.
    """
    for config in configs:
        if config not in CONFIGS:
            near = suggestion(config, CONFIGS, "kernelwright bench model --help")
            raise BadSetting("--config", f"no configuration {config!r}; {near}")
    if unknown := set(first_of) - set(configs):
        raise ValueError(f"--first {', '.join(sorted(unknown))}: not among --config")
    names = list(presets) or list(models.presets())
    for name in names:  # fail before hours of work
        preset_named(name).check(layers=layers, **sizes)
    if out is not None:
        results.check_writable(out)
    at = place.choose_device(device, tiny=tiny)
    kind = place.choose_dtype(dtype, at)
    how: dict[str, Any] = {"tiny": tiny, "device": str(at), "dtype": kind, "layers": layers}
    how |= {"seconds": seconds, "with_error": with_error, "first_of": first_of, **sizes}
    how["with_latents"] = with_latents
    rows: list[dict[str, Any]] = []
    where = environment_of(at) if out is not None else {}
    late = {"failed": f"left out after {minutes or 0:g} minutes", "unavailable": True}
    end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
    with ExitStack() as stack:
        if at.type == "cuda":
            stack.enter_context(torch.cuda.device(at))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("timing", total=len(names) * len(configs))
        for name in names:
            left = list(configs)
            if time.monotonic() < end:
                with closing(measure(name, configs, **how)) as measured:
                    for row in measured:
                        rows.append(row | {"device": at.type})
                        left.remove(row["config"])
                        progress.advance(task)
                        if time.monotonic() >= end:
                            break
            rows += [_row(name, config, tiny, kind, layers, sizes) | late for config in left]
            # what was left out can wait for the last: writing asks the driver for its version
            if out is not None and (len(left) < len(configs) or name == names[-1]):
                results.write(out, "models", rows, environment=where)
            _fresh()
    return rows
