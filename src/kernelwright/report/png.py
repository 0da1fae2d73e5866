"""The charts of the report as pictures, drawn with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .figures import Device, devices, parts, roof
from .reading import Results

COLOURS = {"exact": "#1f5fbf", "fused": "#b4561b", "compile": "#8a8f98", "eager": "#c3bfb7"}


class CannotDraw(RuntimeError):
    """No matplotlib, or nothing to draw."""


def draw(files: Sequence[Results], folder: Path) -> list[Path]:
    """Write speed-up, step and roofline pictures, one of each for every GPU that has the data."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise CannotDraw("--png needs matplotlib: pip install 'kernelwright[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for device in devices(files):
        charts = {"speedup": _speedup, "steps": _steps} if device.models else {}
        if device.ops:
            charts["roofline"] = _roofline
        for name, chart in charts.items():
            figure = Figure(figsize=(9, 6), layout="constrained")
            axes = figure.add_subplot()
            chart(axes, device)
            axes.spines[["top", "right"]].set_visible(False)
            path = folder / f"{name}-{re.sub('[^a-z0-9]+', '-', device.name.lower())}.png"
            figure.savefig(path, dpi=160)
            written.append(path)
    if not written:
        raise CannotDraw("--png: no models and no ops in these files, so nothing to draw")
    return written


def _speedup(axes: Any, device: Device) -> None:
    """Each model's fastest run with the same bits beside torch.compile."""
    models = [m for m in device.models if m.best_exact][::-1]
    shown = {"torch.compile": "compile", "fastest with the same bits": "exact"}
    for shift, (label, colour) in zip((-0.2, 0.2), shown.items(), strict=True):
        rows = [m.best_exact if colour == "exact" else m.row("compile") for m in models]
        gains = [(row and m.speedup(row)) or 0.0 for m, row in zip(models, rows, strict=True)]
        places = [n + shift for n in range(len(models))]
        drawn = axes.barh(places, gains, height=0.38, color=COLOURS[colour], label=label)
        axes.bar_label(drawn, [f"{g:.2f}×" if g else "" for g in gains], padding=3, fontsize=8)
    axes.set_yticks(range(len(models)), [m.title for m in models])
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="speed-up over eager", title=device.name)
    axes.legend(frameon=False)


def _steps(axes: Any, device: Device) -> None:
    """Milliseconds of a step, eager above exact; by kind of kernel where the file has it."""
    labels: list[str] = []
    kinds: dict[str, str] = {}
    pairs = [(m, m.row("eager"), m.after) for m in device.models[::-1]]
    for model, before, after in pairs:
        if not (before and after and before.ms and after.ms):
            continue
        for row in (after, before):
            start = 0.0
            total = "eager" if row is before else "exact"
            for part, ms in (parts(row) or {f"{total}, total": row.ms or 0.0}).items():
                colour = COLOURS[total] if "total" in part else f"C{len(kinds)}"
                colour = kinds.setdefault(part, colour)
                axes.barh(len(labels), ms, left=start, color=colour)
                start += ms
            labels.append(f"{model.title}, {row.config}")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set(xlabel="ms of one forward", title=device.name)
    handles = [axes.barh(0, 0, color=colour, label=part) for part, colour in kinds.items()]
    axes.legend(handles=handles, frameon=False)


def _roofline(axes: Any, device: Device) -> None:
    axes.plot(
        *zip(*roof(device.ops), strict=True), color="black", linewidth=1, label="copy, same run"
    )
    for colour in ("eager", "compile", "fused", "exact"):
        points = []
        for row in device.ops:
            way = {"fused": row.chosen, "exact": row.slowest_exact}.get(colour, colour)
            if way in row.gpu_us:
                points.append((row.megabytes, row.bandwidth(way)))
        if points:
            label = {"fused": "chosen kernel", "exact": "exact, slowest chain"}.get(colour, colour)
            axes.scatter(*zip(*points, strict=True), s=16, color=COLOURS[colour], label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="MB read and written", ylabel="GB/s", title=device.name)
    axes.legend(frameon=False)
