"""The charts of the report as pictures, drawn with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .figures import Device, devices, profiled, roof
from .markup import STYLE
from .reading import Results
from .waterfall import part_colours

# the colours of the page in its light scheme
COLOURS = dict(re.findall(r"--(\w+): (#\w+)", STYLE.partition("@media")[0]))


class CannotDraw(RuntimeError):
    """No matplotlib, or nothing to draw."""


def draw(files: Sequence[Results], folder: Path) -> list[Path]:
    """Write a picture of each chart for every GPU with data for it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise CannotDraw("--png needs matplotlib: pip install 'kernelwright[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for device in devices(files):
        charts = {
            "speedup": (_speedup, device.models),
            "steps": (_steps, device.models),
            "video": (_video, device.videos),
            "profile": (_profile, [p for p in device.profiles if p.rows]),
            "roofline": (_roofline, device.ops),
        }
        for name, chart in ((name, chart) for name, (chart, data) in charts.items() if data):
            figure = Figure(figsize=(9, 6), layout="constrained")
            axes = figure.add_subplot()
            chart(axes, device)
            axes.spines[["top", "right"]].set_visible(False)
            path = folder / f"{name}-{re.sub('[^a-z0-9]+', '-', device.name.lower())}.png"
            figure.savefig(path, dpi=160)
            written.append(path)
    if not written:
        raise CannotDraw("--png: these files have no data for a chart")
    return written


def _speedup(axes: Any, device: Device) -> None:
    """Each model's fastest run with eager's bits, beside torch.compile."""
    models = [m for m in device.models if m.best_exact][::-1]
    shown = {"torch.compile": "compile", "fastest with the same bits": "exact"}
    for shift, (label, colour) in zip((-0.2, 0.2), shown.items(), strict=True):
        rows = [m.best_exact if colour == "exact" else m.best_compiled for m in models]
        gains = [(row and m.speedup(row)) or 0.0 for m, row in zip(models, rows, strict=True)]
        places = [n + shift for n in range(len(models))]
        drawn = axes.barh(places, gains, height=0.38, color=COLOURS[colour], label=label)
        axes.bar_label(drawn, [f"{g:.2f}×" if g else "" for g in gains], padding=3, fontsize=8)
    axes.set_yticks(range(len(models)), [m.title for m in models])
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="speed-up over eager", title=device.name)
    axes.legend(frameon=False)


def _steps(axes: Any, device: Device) -> None:
    """Milliseconds of a step, eager and exact; by kind of kernel where the file has it."""
    lines = []
    for model in device.models:
        for colour, step in zip(("eager", "exact"), model.steps or (), strict=False):
            split = step.parts or {f"{colour}, total": step.ms}
            lines.append((f"{model.title}, {step.config}", split))
    _stacked(axes, lines)
    axes.set(xlabel="ms of one forward", title=device.name)


def _video(axes: Any, device: Device) -> None:
    """Seconds of whole videos: text, denoising, decoding."""
    lines = [
        (f"{video.title}, {row.config}", row.parts)
        for video in device.videos
        for row in video.rows
        if row is not video.control
    ]
    _stacked(axes, lines)
    axes.set(xlabel="seconds from prompt to frames", title=device.name)


def _profile(axes: Any, device: Device) -> None:
    """Milliseconds of a step by category, from a profile."""
    lines = [
        (f"{profile.title}, {row.config}", split)
        for profile in device.profiles
        for row, split in profiled(*profile.rows)
    ]
    _stacked(axes, lines)
    axes.set(xlabel="ms of one forward", title=device.name)


def _stacked(axes: Any, lines: Sequence[tuple[str, dict[str, float]]]) -> None:
    """A bar of parts for each line, the first on top."""
    names = part_colours(dict.fromkeys(part for _, split in lines for part in split))
    colours = {}
    for place, (_, split) in enumerate(lines):
        start = 0.0
        for part, length in split.items():
            whole = COLOURS.get(part.removesuffix(", total"))
            colours[part] = whole or COLOURS[names[part]]
            axes.barh(place, length, left=start, color=colours[part])
            start += length
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axes.invert_yaxis()
    handles = [axes.barh(0, 0, color=colour, label=part) for part, colour in colours.items()]
    axes.legend(handles=handles, frameon=False)


def _roofline(axes: Any, device: Device) -> None:
    axes.plot(
        *zip(*roof(device.ops), strict=True), color="black", linewidth=1, label="copy, same run"
    )
    for colour in ("eager", "compile", "fused", "exact"):
        points = []
        for row in device.ops:
            way = {"fused": row.chosen, "exact": row.slowest_exact}.get(colour, colour)
            if way in row.us:
                points.append((row.megabytes, row.bandwidth(way)))
        if points:
            label = {"fused": "chosen kernel", "exact": "exact, slowest chain"}.get(colour, colour)
            axes.scatter(*zip(*points, strict=True), s=16, color=COLOURS[colour], label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="MB read and written", ylabel="GB/s", title=device.name)
    axes.legend(frameon=False)
