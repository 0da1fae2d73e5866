"""The data of the page and the pictures: rows grouped by GPU, model and video."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..video.settings import CONTROL
from .reading import Results
from .rows import (
    CountedRow,
    ExactRow,
    GenerationRow,
    ModelRow,
    OpRow,
    ProfileRow,
    TrainingRow,
    VideoRow,
)

IDLE = "no kernel"


@dataclass(frozen=True)
class Step:
    """One forward: its time, and the milliseconds of each part where the file has them."""

    config: str
    ms: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Model:
    """The configurations of one model in one file."""

    title: str
    rows: tuple[ModelRow, ...]

    def row(self, config: str) -> ModelRow | None:
        return next((r for r in self.rows if r.config == config and r.ms is not None), None)

    def speedup(self, row: ModelRow) -> float | None:
        eager = self.row("eager")
        return eager.ms / row.ms if eager and eager.ms and row.ms else None

    @property
    def best_exact(self) -> ModelRow | None:
        """The fastest injected configuration with the bits of eager."""
        same = [r for r in self.rows if "exact" in r.config and r.equal and self.speedup(r)]
        return max(same, key=lambda r: self.speedup(r) or 0.0, default=None)

    @property
    def best_compiled(self) -> ModelRow | None:
        """torch.compile at its best, with or without a CUDA graph and max-autotune."""
        compiled = [r for r in self.rows if r.config.startswith("compile") and r.ms]
        return min(compiled, key=lambda r: r.ms or 0.0, default=None)

    @property
    def floor(self) -> float | None:
        """Milliseconds of the GEMMs and attention of the exact run."""
        exact = self.row("exact+graphs") or self.row("exact")
        return exact.split["GEMM"] + exact.split["attention"] if exact and exact.split else None

    @property
    def gain(self) -> float:
        return (self.best_exact and self.speedup(self.best_exact)) or 0.0

    @property
    def after(self) -> ModelRow | None:
        return self.row("exact") or self.best_exact

    @property
    def steps(self) -> tuple[Step, Step] | None:
        """Eager and the exact run."""
        before, after = self.row("eager"), self.after
        if not (before and after and before.ms and after.ms):
            return None
        old, new = (Step(r.config, r.ms or 0.0, parts(r.ms, r.split)) for r in (before, after))
        return old, new


@dataclass(frozen=True)
class Training:
    """The configurations of one model that is trained, in one file."""

    title: str
    rows: tuple[TrainingRow, ...]

    def speedup(self, row: TrainingRow) -> float | None:
        eager = next((r for r in self.rows if r.config == "eager"), None)
        return eager.ms / row.ms if eager and eager.ms and row.ms else None


@dataclass(frozen=True)
class Generation:
    """The configurations of one language model that generates, in one file."""

    title: str
    rows: tuple[GenerationRow, ...]

    def speedup(self, row: GenerationRow) -> float | None:
        """Over eager, with transformers' default cache if that was timed, else a static one."""
        named = {r.config: r for r in self.rows}
        eager = named.get("eager") or named.get("eager+static")
        return eager.ms / row.ms if eager and eager.ms and row.ms else None


@dataclass(frozen=True)
class Video:
    """The configurations of one generation in one file; the second eager is the control."""

    title: str
    rows: tuple[VideoRow, ...]

    @property
    def control(self) -> VideoRow | None:
        return next((row for row in self.rows if row.config == CONTROL), None)

    def speedup(self, row: VideoRow) -> float | None:
        eager = next((r for r in self.rows if r.config == "eager"), None)
        return eager.total_s / row.total_s if eager and eager.total_s and row.total_s else None


@dataclass(frozen=True)
class Profile:
    """The profiles of one model by one tool in one file."""

    title: str
    rows: tuple[ProfileRow, ...]
    counted: tuple[CountedRow, ...]

    @property
    def steps(self) -> tuple[Step, Step] | None:
        """Eager, and the first other configuration with kernels of ours."""
        eager = next((r for r in self.rows if r.config == "eager"), None)
        ours = (r for r in self.rows if any(kernel.ours for kernel in r.kernels))
        after = next(ours, None) or next((r for r in self.rows if r.config != "eager"), None)
        if eager is None or after is None:
            return None
        old, new = (Step(r.config, sum(p.values()), p) for r, p in profiled(eager, after))
        return old, new


def profiled(*rows: ProfileRow) -> list[tuple[ProfileRow, dict[str, float]]]:
    """Each row with the milliseconds of its categories and the rest of its wall time."""
    return [(row, parts(row.wall_ms, row.categories)) for row in rows]


@dataclass(frozen=True)
class Device:
    """Everything that was measured on one kind of GPU."""

    name: str
    files: tuple[Results, ...]
    models: tuple[Model, ...]
    loops: tuple[Model, ...]
    training: tuple[Training, ...]
    generation: tuple[Generation, ...]
    videos: tuple[Video, ...]
    profiles: tuple[Profile, ...]
    ops: tuple[OpRow, ...]
    exact: tuple[ExactRow, ...]


def devices(files: Sequence[Results]) -> list[Device]:
    """The files grouped by GPU, models by speed-up."""
    groups: dict[str, list[Results]] = {}
    for file in files:
        groups.setdefault(file.environment.device, []).append(file)
    return [
        Device(
            name,
            tuple(group),
            tuple(sorted(_models(group), key=lambda m: -m.gain)),
            tuple(_models(group, loops=True)),
            tuple(_training(group)),
            tuple(_generation(group)),
            tuple(_videos(group)),
            tuple(_profiles(group)),
            tuple(row for file in group for row in file.ops),
            tuple(row for file in group for row in file.exact),
        )
        for name, group in groups.items()
    ]


def _models(files: list[Results], loops: bool = False) -> list[Model]:
    def rows(file: Results) -> list[ModelRow]:
        return [row for row in file.models if row.workload.is_loop == loops]

    grouped = _grouped(files, rows, lambda row: row.workload.title)
    return [Model(title, tuple(rows)) for title, rows in grouped]


def _training(files: list[Results]) -> list[Training]:
    grouped = _grouped(files, lambda file: file.training, lambda row: row.title)
    return [Training(title, tuple(rows)) for title, rows in grouped]


def _generation(files: list[Results]) -> list[Generation]:
    grouped = _grouped(files, lambda file: file.generation, lambda row: row.title)
    # eager first, in whichever order they were timed
    ordered = (
        (title, sorted(rows, key=lambda r: "eager" not in r.config)) for title, rows in grouped
    )
    return [Generation(title, tuple(rows)) for title, rows in ordered]


def _videos(files: list[Results]) -> list[Video]:
    grouped = _grouped(files, lambda file: file.video, lambda row: row.title)
    return [Video(title, tuple(rows)) for title, rows in grouped]


SOURCES = {1: "torch.profiler", 2: "nsys", 3: "ncu"}


def _profiles(files: list[Results]) -> list[Profile]:
    def title(row: ProfileRow | CountedRow) -> str:
        level = row.level if isinstance(row, ProfileRow) else 3
        return f"{row.workload.title}, {SOURCES[level]}"

    return [
        Profile(
            title,
            tuple(row for row in rows if isinstance(row, ProfileRow)),
            tuple(row for row in rows if isinstance(row, CountedRow)),
        )
        for title, rows in _grouped(files, lambda file: file.profile, title)
    ]


def _grouped(
    files: list[Results],
    rows_of: Callable[[Results], Iterable[Any]],
    title_of: Callable[[Any], str],
) -> list[tuple[str, list[Any]]]:
    """Rows grouped by file and title; file names are added where several have the same title."""
    groups: dict[tuple[str, int], list[Any]] = {}
    for number, file in enumerate(files):
        for row in rows_of(file):
            groups.setdefault((title_of(row), number), []).append(row)
    titles = [title for title, _ in groups]
    made = []
    for (title, number), rows in groups.items():
        file = files[number]
        several = f"{title} ({file.path.name} of {short(file)})"
        made.append((several if titles.count(title) > 1 else title, rows))
    return made


def short(file: Results) -> str:
    return (file.environment.commit or "no commit")[:8]


def parts(ms: float | None, split: dict[str, float]) -> dict[str, float]:
    """Milliseconds by kind of kernel, and the rest, in which no kernel ran."""
    idle = (ms or 0.0) - sum(split.values())
    return {**split, **({IDLE: idle} if split and idle > 0 else {})}


def roof(rows: Sequence[OpRow]) -> list[tuple[float, float]]:
    """GB/s of a copy by megabytes: medians over sizes within 7% of each other."""
    near: dict[int, list[OpRow]] = {}
    for row in rows:
        near.setdefault(round(math.log2(row.megabytes) * 10), []).append(row)
    return [
        (statistics.median(r.megabytes for r in group), statistics.median(r.roof for r in group))
        for _, group in sorted(near.items())
    ]
