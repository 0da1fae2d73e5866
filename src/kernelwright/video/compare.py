"""Compares configurations of one generation with eager, and eager with itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from ..errors import CannotRun
from ..progress import Show, show_nothing
from .run import Measured, Run, measure
from .settings import CONTROL, Settings
from .ways import EAGER, Way


def compare(
    pipe: Any,
    settings: Settings,
    ways: Sequence[Way],
    *,
    show: Show = show_nothing,
    keep: Callable[[str, Run], None] | None = None,
) -> list[dict[str, Any]]:
    """One row per way, all from the same seed. The first is eager, the second eager again: what
    differs there differs without any kernel. `keep` is called with all runs but the second.

    A way that promises eager's bits and does not give them has `failed` instead of times.
    """
    plan = [(str(EAGER), EAGER), (CONTROL, EAGER), *((str(w), w) for w in ways if w != EAGER)]
    base: Run | None = None
    repeats = True
    rows: list[dict[str, Any]] = []
    for name, way in plan:
        found = measure(pipe, settings, way, show)
        run = found.run
        if base is None:
            base = run
            if not base.latents.isfinite().all():
                raise CannotRun(
                    "the latents of eager are not finite: there is nothing to compare with"
                )
        row = {"config": name, **against(run.latents, base.latents)}
        if name == CONTROL:
            repeats = row["equal"]
        if not run.latents.isfinite().all():
            row["failed"] = "latents not finite"
        elif way.keeps_bits and repeats and not row["equal"]:
            row["failed"] = "not the bits of eager"
        else:
            row |= {**run.times(), "speedup": base.total_s / run.total_s}
        rows.append(row | {"ready_s": found.ready_s, **found.notes()})
        if keep is not None and name != CONTROL:
            keep(name, run)
    return rows


def against(latents: Tensor, eager: Tensor) -> dict[str, Any]:
    """Whether latents equal eager's, and their PSNR in dB over the range of eager's values; None
    where it is undefined: equal or non-finite values."""
    values, expected = latents.double(), eager.double()
    off = float((values - expected).square().mean().sqrt())
    peak = float(expected.max() - expected.min())
    psnr = 20 * math.log10(peak / off) if math.isfinite(off) and off > 0 and peak > 0 else None
    return {"equal": torch.equal(latents, eager), "psnr_db": psnr}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows for the terminal."""
    note = "PSNR of the last latents against eager's; same: torch.equal"
    shown = Table(title=title, caption=note, box=SIMPLE_HEAD, padding=0)
    shown.add_column("", no_wrap=True)
    for column in (
        "total\ns",
        "ms a\nstep",
        "ms a\nframe",
        "text\ns",
        "denoise\ns",
        "decode\ns",
        "GiB",
        "speed\nup",
        "PSNR\ndB",
    ):
        shown.add_column(column, justify="right")
    for row in rows:
        if "failed" in row:
            shown.add_row(row["config"], "wrong", *[""] * 7, _psnr(row), style="red")
            continue
        shown.add_row(
            row["config"],
            f"{row['total_s']:.2f}",
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['frame_s'] * 1e3:.1f}",
            f"{row['text_s']:.2f}",
            f"{row['denoise_s']:.2f}",
            f"{row['decode_s']:.2f}",
            _gib(row),
            f"{row['speedup']:.2f}×",
            _psnr(row),
        )
    return shown


def summary(measured: Measured) -> Table:
    """The times of one run for the terminal."""
    times = measured.run.times()
    parts = " + ".join(f"{times[f'{p}_s']:.2f} {p}" for p in ("text", "denoise", "decode"))
    shown = Table.grid(padding=(0, 2))
    shown.add_row("run", str(measured.way))
    shown.add_row("total", f"{times['total_s']:.2f} s: {parts}")
    shown.add_row("a step", f"{times['step_s'] * 1e3:.1f} ms")
    shown.add_row("a frame", f"{times['frame_s'] * 1e3:.1f} ms")
    if "reserved_gib" in times:
        shown.add_row("memory", f"{_gib(times)} GiB")
    if measured.report is not None:
        shown.add_row("kernels", measured.report.summary)
        if measured.way.graphs:
            shown.add_row("graphs", _graphs(measured))
    return shown


def _graphs(measured: Measured) -> str:
    """What was captured, or why nothing was."""
    assert measured.report is not None
    told = "\n".join(graphs.describe() for graphs in measured.report.graphs)
    if any(graphs.captured for graphs in measured.report.graphs):
        return told
    return f"no CUDA graph was made, every call ran without one:\n{told}"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Notes to print below the table."""
    told = []
    if any(row["config"] == CONTROL and not row["equal"] for row in rows):
        told.append("Two runs of eager differ here: no configuration can be held to its bits.")
    for row in rows:
        if "failed" in row:
            told.append(f"{row['config']}: {row['failed']}")
        told += [f"{row['config']}: {p['module']}: {p['problem']}" for p in row.get("problems", ())]
        told += [f"{row['config']}: {graphs}" for graphs in row.get("graphs", ())]
    return told


def _psnr(row: dict[str, Any]) -> str:
    if row["equal"]:
        return "same"
    return "none" if row["psnr_db"] is None else f"{row['psnr_db']:.1f}"


def _gib(row: dict[str, Any]) -> str:
    return f"{row['reserved_gib']:.1f}" if "reserved_gib" in row else "–"
