"""`kernelwright demo`: frames of an LTX-Video pipeline before and after injection.

The pipeline is built from its configs with random weights, so nothing is downloaded; its frames are
noise, and in "exact" the same noise bit for bit.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from . import demo_picture
from .backends import installed
from .errors import CannotRun
from .inject import Report, inject, restore
from .inject.verify.accuracy import error as error_against
from .measure.cpu_caveat import CAVEAT
from .measure.results import check_writable
from .place import choose_device, choose_dtype
from .video.settings import PROMPT

STEPS = 3
PICTURED = ("exact", "fused")


@dataclass(frozen=True)
class Size:
    """What is generated."""

    tiny: bool
    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        model = "a tiny LTX-Video" if self.tiny else "LTX-Video 2B"
        return f"{model}, {self.frames} frames of {self.width} × {self.height}"


TINY = Size(True, 9, 64, 96)
FULL = Size(False, 49, 512, 768)


@dataclass(frozen=True)
class Row:
    """One configuration: whether its frames have eager's bits, their error against a float32 run,
    milliseconds per denoising step, and seconds of its first run."""

    name: str
    equal: bool
    error: float
    step_ms: float
    first_s: float
    passed: bool


@dataclass(frozen=True)
class Result:
    device: str
    dtype: str
    size: str
    rows: tuple[Row, ...]
    report: Report
    saved: str | None = None

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "device": self.device,
            "dtype": self.dtype,
            "size": self.size,
            "rows": [asdict(row) for row in self.rows],
            "report": self.report.to_dict(),
        }


def run(
    device: str | None, console: Console, *, full: bool = False, save: Path | None = None
) -> Result:
    """Generate frames in plain diffusers, injected, and restored; compare and time them."""
    if not installed("diffusers") or not installed("transformers"):
        raise CannotRun("diffusers is not installed: pip install 'kernelwright[models]'")
    from . import models

    size = FULL if full else TINY
    if save is not None:
        check_writable(save, "--save")
        demo_picture.check_name(save)
    place = choose_device(device, tiny=size.tiny, smaller="the tiny model (without --full)")
    # bfloat16 on the CPU too: in float32 the error against float32 would be zero
    dtype = torch.bfloat16 if place.type == "cpu" else choose_dtype(None, place)
    ways = _ways(place)
    # a CPU without bfloat16 warns once, at length
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"building {size}", total=len(ways) + 2)
        pipe = models.ltx_pipeline(tiny=size.tiny, dtype=dtype, device=place)
        pipe.set_progress_bar_config(disable=True)
        progress.update(task, advance=1, description="a float32 run")
        truth = _frames(_wide(pipe), size)
        rows: list[Row] = []
        expected: Tensor | None = None
        report: Report | None = None
        shown: dict[str, Tensor] = {}
        for name, prepare in ways.items():
            progress.update(task, advance=1, description=name)
            found = prepare(pipe)
            begin = time.perf_counter()
            frames, seconds = _timed(pipe, size, place)
            first = time.perf_counter() - begin
            if place.type == "cuda":  # time it warm; times on the CPU say nothing anyway
                frames, seconds = _timed(pipe, size, place)
            expected = frames if expected is None else expected
            report = report or found
            if name in PICTURED:
                shown[name] = frames
            rows.append(_row(name, frames, expected, truth, seconds, first, rows))
        restore(pipe)
    assert expected is not None
    assert report is not None
    if save is not None:
        demo_picture.save(save, expected, shown)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    kept = None if save is None else str(save)
    return Result(name, str(dtype).removeprefix("torch."), str(size), tuple(rows), report, kept)


def _ways(place: torch.device) -> dict[str, Callable[[Any], Report | None]]:
    """How each configuration prepares the pipeline, by name; the others are compared with the
    first."""
    ways: dict[str, Callable[[Any], Report | None]] = {
        "eager": lambda pipe: None,
        "exact": inject,
        "fused": lambda pipe: inject(pipe, numerics="fused"),
    }
    if place.type == "cuda":
        ways["exact, graphs"] = lambda pipe: inject(pipe, graphs=True)
    ways["restored"] = _restored
    return ways


def _restored(pipe: Any) -> None:
    restore(pipe)


def _row(
    name: str,
    frames: Tensor,
    expected: Tensor,
    truth: Tensor,
    seconds: float,
    first: float,
    before: list[Row],
) -> Row:
    equal, error = torch.equal(frames, expected), error_against(frames, truth)
    # over a few frames the errors of two equally good roundings differ by chance
    passed = error <= 1.5 * before[0].error if "fused" in name else equal
    return Row(name, equal, error, seconds * 1e3, first, passed)


def _frames(pipe: Any, size: Size, each_step: Callable[[], None] | None = None) -> Tensor:
    """[frames, channels, height, width] in 0..1"""

    def after(pipe: Any, index: int, step: Any, given: dict[str, Any]) -> dict[str, Any]:
        if each_step is not None:
            each_step()
        return given

    return pipe(
        prompt=PROMPT,
        num_frames=size.frames,
        height=size.height,
        width=size.width,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        callback_on_step_end=after,
    ).frames[0]


def _timed(pipe: Any, size: Size, place: torch.device) -> tuple[Tensor, float]:
    """The frames, and the seconds per denoising step."""
    ends: list[float] = []

    def note() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        ends.append(time.perf_counter())

    frames = _frames(pipe, size, note)
    return frames, (ends[-1] - ends[0]) / (len(ends) - 1)


def _wide(pipe: Any) -> Any:
    """The same pipeline in float32."""
    parts = {
        name: nn.Module.float(copy.deepcopy(part)) if isinstance(part, nn.Module) else part
        for name, part in pipe.components.items()
    }
    wide = type(pipe)(**parts)
    wide.set_progress_bar_config(disable=True)
    return wide


def page(result: Result) -> RenderableType:
    """The result for the terminal."""
    table = Table(title=f"{result.size}, {STEPS} steps, {result.dtype}, {result.device}")
    for name in ("", "frames", "error against float32", "ms a step", "first run, s"):
        table.add_column(name, justify="left" if name in ("", "frames") else "right")
    for row in result.rows:
        table.add_row(
            row.name,
            "the same bits" if row.equal else "differ",
            f"{row.error:.2e}",
            f"{row.step_ms:.1f}",
            f"{row.first_s:.2f}",
            style=None if row.passed else "red",
        )
    lines: list[RenderableType] = [result.report, "", table]
    if result.device == "CPU":
        lines.append(CAVEAT)
    if result.saved:
        lines.append(f"Frames before and after, and their difference: {result.saved}")
    return Group(*lines)
