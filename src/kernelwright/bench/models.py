"""Times one forward of whole models: eager, torch.compile, injected, and what can be combined.

A time is taken only after the result was held against eager: "exact" must give its bits, "fused"
an error against a float32 run of the same weights that is not above eager's.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import models
from ..inject import contract, injected
from ..inject.check import equal
from ..inject.report import Report
from ..profiling.categories import split
from ..profiling.record import record
from . import results

CONFIGS = (
    "eager",
    "exact",
    "exact+graphs",
    "fused",
    "fused+graphs",
    "compile",
    "exact+compile",
    "fused+compile",
)


class Wrong(AssertionError):
    """A model gave what it must not give: its time would mean nothing."""


def measure(
    preset: str,
    configs: Sequence[str] = CONFIGS,
    *,
    tiny: bool = False,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
    with_error: bool = True,
    **sizes: int,
) -> list[dict[str, Any]]:
    """One row a configuration: milliseconds a forward, memory, seconds to the first result."""
    build: dict[str, Any] = {"tiny": tiny, "device": device, "dtype": dtype}
    model = models.build(preset, **build)
    inputs = models.inputs(preset, **{**build, **sizes})
    with torch.no_grad():
        expected = model(**inputs)
        truth = _truth(model, inputs) if with_error else None
        eager_error = contract.error(expected, truth) if with_error else None
        rows = []
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
            except Wrong as wrong:
                row["failed"] = str(wrong)
            rows.append(row)
    return rows


def _measure(
    model: nn.Module,
    inputs: dict[str, Any],
    config: str,
    expected: Any,
    truth: Any,
    eager_error: float | None,
    seconds: float,
) -> dict[str, Any]:
    tier = _tier(config)
    _fresh()
    with ExitStack() as stack:
        begin = time.perf_counter()
        run, report = configured(model, config, stack)
        result = run(**inputs)
        _wait()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        result = run(**inputs)  # graphs are captured here
        _wait()
        second = time.perf_counter() - begin
        result = run(**inputs)
        row: dict[str, Any] = {
            "equal": equal(result, expected),
            "error": None if truth is None else contract.error(result, truth),
            "eager_error": eager_error,
            "first_s": first,
            "second_s": second,
        }
        _check(config, tier, row, contract.rows(expected))
        del result
        if report is not None:
            row["replaced"] = report.replaced
            row["sites"] = report.sites
            row["problems"] = report.to_dict()["problems"]
            row["graphs"] = [g.describe() for g in report.graphs]
        row["ms"] = milliseconds(lambda: run(**inputs), seconds)
        row |= _memory()
        if (device := _device(inputs)).type == "cuda":
            row["split"] = split(record(lambda: run(**inputs), device))
    return row


def configured(
    model: nn.Module, config: str, stack: ExitStack
) -> tuple[Callable[..., Any], Report | None]:
    """What to call for `model` in this configuration until `stack` closes, and inject's report."""
    parts = config.split("+")
    report = None
    if tier := _tier(config):
        how = {"numerics": tier, "graphs": "graphs" in parts}
        report = stack.enter_context(injected(model, **how))
    return (_compiled(model, stack) if "compile" in parts else model), report


def _tier(config: str) -> str | None:
    return next((p for p in config.split("+") if p in ("exact", "fused")), None)


def _device(inputs: dict[str, Any]) -> torch.device:
    return next(t.device for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))


def _compiled(model: Any, stack: ExitStack) -> Callable[..., Any]:
    """By block where the library names the blocks, as diffusers recommends; else the whole."""
    torch._dynamo.reset()
    repeated = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    blocks = [m for m in model.modules() if type(m).__name__ in (repeated or ())]
    if not blocks:
        return torch.compile(model)
    for block in blocks:
        block.compile()

    def undo() -> None:
        for block in blocks:
            block._compiled_call_impl = None

    stack.callback(undo)
    return model


def _check(config: str, tier: str | None, row: dict[str, Any], rows: int) -> None:
    """Wrong answers have no time. What torch.compile touches rounds as it likes."""
    if tier == "exact" and "compile" not in config and not row["equal"]:
        raise Wrong(f"{config}: not the bits of eager")
    if tier == "fused" and not contract.holds(rows, row["error"], row["eager_error"]):
        raise Wrong(f"{config}: error {row['error']:.3e}, eager's is {row['eager_error']:.3e}")


def _truth(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The result of the same weights in float32."""
    twin = nn.Module.float(copy.deepcopy(model))
    truth = twin(**contract.widened(inputs))
    del twin
    _fresh()
    return truth


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """Median wall time of a call, waited for; enough calls to fill `seconds`, five at least."""
    readings: list[float] = []
    end = time.perf_counter() + seconds
    while len(readings) < 5 or time.perf_counter() < end:
        _wait()
        begin = time.perf_counter()
        call()
        _wait()
        readings.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(readings)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _fresh() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def _sizes(preset: str, tiny: bool) -> dict[str, int]:
    found = models.presets()[preset]
    return dict(found.tiny_sizes if tiny else found.sizes)


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="One forward")
    columns = ("model", "config", "ms", "against eager", "first s", "GiB", "bits", "error")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("model", "config") else "right")
    eager = {(r["model"], str(r["sizes"])): r["ms"] for r in rows if r["config"] == "eager"}
    for row in rows:
        if "failed" in row:
            shown.add_row(row["model"], row["config"], row["failed"], style="red")
            continue
        base = eager.get((row["model"], str(row["sizes"])))
        error = "" if row["error"] is None else f"{row['error']:.2e}"
        shown.add_row(
            row["model"],
            row["config"],
            f"{row['ms']:.1f}",
            f"{base / row['ms']:.2f}×" if base else "",
            f"{row['first_s']:.1f}",
            f"{row['reserved_gib']:.1f}" if "reserved_gib" in row else "",
            "same" if row["equal"] else "differ",
            error,
        )
    return shown


def run(
    presets: Sequence[str],
    configs: Sequence[str],
    sizes: dict[str, int],
    *,
    tiny: bool = False,
    device: str | None = None,
    dtype: str = "bfloat16",
    seconds: float = 2.0,
    with_error: bool = True,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure presets (all if none is named) one after the other, and write down what is done."""
    for config in configs:
        if config not in CONFIGS:
            raise ValueError(f"no configuration {config!r}, expected any of {', '.join(CONFIGS)}")
    names = list(presets) or list(models.presets())
    for name in names:  # before hours of work, not in between
        models.inputs(name, tiny=True)
    if out is not None:
        results.check_writable(out)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"tiny": tiny, "device": place, "with_error": with_error}
    how["dtype"] = getattr(torch, dtype)
    rows: list[dict[str, Any]] = []
    for name in track(names, "timing", console=Console(stderr=True), transient=True):
        rows += measure(name, configs, seconds=seconds, **{**how, **sizes})
        _fresh()
        if out is not None:
            results.write(out, "models", rows)
    return rows
