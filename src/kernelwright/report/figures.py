"""What the page and the pictures show: rows put together by GPU and model, sentences, steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .reading import Results
from .rows import ExactRow, ModelRow, OpRow

IDLE = "no kernel"


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
        """The fastest injected configuration that gave the bits of eager."""
        same = [r for r in self.rows if "exact" in r.config and r.equal and self.speedup(r)]
        return max(same, key=lambda r: self.speedup(r) or 0.0, default=None)

    @property
    def after(self) -> ModelRow | None:
        return self.row("exact") or self.best_exact


@dataclass(frozen=True)
class Device:
    """Everything that was measured on one kind of GPU."""

    name: str
    files: tuple[Results, ...]
    models: tuple[Model, ...]
    ops: tuple[OpRow, ...]
    exact: tuple[ExactRow, ...]


def devices(files: Sequence[Results]) -> list[Device]:
    """The files by GPU, the models with the largest gain first."""
    groups: dict[str, list[Results]] = {}
    for file in files:
        groups.setdefault(file.environment.device, []).append(file)
    return [
        Device(
            name,
            tuple(group),
            tuple(sorted(_models(group), key=lambda m: -_gain(m))),
            tuple(row for file in group for row in file.ops),
            tuple(row for file in group for row in file.exact),
        )
        for name, group in groups.items()
    ]


def _models(files: list[Results]) -> list[Model]:
    groups: dict[tuple[str, str, int], list[ModelRow]] = {}
    for number, file in enumerate(files):
        for row in file.models:
            groups.setdefault((row.title, row.dtype, number), []).append(row)
    titles = [(title, dtype) for title, dtype, _ in groups]
    made = []
    for (title, dtype, number), rows in groups.items():
        words = title if dtype == "bfloat16" else f"{title} {dtype}"
        if titles.count((title, dtype)) > 1:
            words = f"{words} ({files[number].path.name} of {short(files[number])})"
        made.append(Model(words, tuple(rows)))
    return made


def short(file: Results) -> str:
    return (file.environment.commit or "no commit")[:8]


def _gain(model: Model) -> float:
    return (model.best_exact and model.speedup(model.best_exact)) or 0.0


def lead(found: Sequence[Device]) -> list[str]:
    """The best true thing that the data shows, and what is needed to judge it."""
    real = [(d, m) for d in found if d.name != "CPU" for m in d.models if not m.rows[0].tiny]
    gains = [(_gain(m), d, m) for d, m in real if m.best_exact]
    sentences = []
    if gains:
        gain, device, model = max(gains, key=lambda g: g[0])
        assert model.best_exact
        how = f"{model.best_exact.config} on {device.name}"
        sentences.append(f"{model.title}: {gain:.2f}× with the same bits ({how}).")
        if len(gains) > 1:
            middle = statistics.median(g for g, _, _ in gains)
            models = f"{len(gains)} models, each at its fastest with the same bits"
            sentences.append(f"Median of {models}: {middle:.2f}×.")
        pairs = [(m.best_exact, m.row("compile")) for _, _, m in gains]
        known = [(a.ms, b.ms) for a, b in pairs if a and b and a.ms and b.ms]
        if known:
            ahead = sum(a < b for a, b in known)
            sentences.append(f"Faster than torch.compile in {ahead} of {len(known)}.")
    elif any(d.models for d in found):
        sentences.append("No model of full size was timed on a GPU: the times here say nothing.")
    slower = [
        f"{r.model} {r.config} {m.speedup(r):.2f}×"
        for _, m in real
        for r in m.rows
        if r.replaced is not None and (m.speedup(r) or 1) < 1
    ]
    if slower:
        sentences.append(f"Slower than eager: {', '.join(slower)}.")
    failed = [f"{r.model} {r.config}" for d in found for m in d.models for r in m.rows if r.failed]
    if failed:
        sentences.append(f"Failed: {', '.join(failed)}.")
    for device in found if not gains else ():
        sentences += [ops_sentence(device)] if device.ops else []
        sentences += [exact_sentence(device)] if device.exact else []
    return sentences


def ops_sentence(device: Device) -> str:
    shares = [row.share(row.chosen) for row in device.ops if row.chosen in row.gpu_us]
    if not shares:
        return f"{len(device.ops)} cases of ops on {device.name}."
    return (
        f"{len(device.ops)} cases of ops on {device.name}: the chosen kernel reaches "
        f"{statistics.median(shares):.0%} of the bandwidth of a copy (median), "
        f"{min(shares):.0%} at the least."
    )


def exact_sentence(device: Device) -> str:
    covered = [row for row in device.exact if row.mismatches is not None]
    elements = sum(row.elements for row in covered)
    wrong = sum(row.mismatches or 0 for row in covered)
    chains = len({(row.op, row.chain) for row in covered})
    left = len(device.exact) - len(covered)
    return (
        f"{len(covered):,} sizes of {chains} exact modes, {elements:,} elements compared with "
        f"eager on {device.name}: {wrong:,} mismatches"
        + (f"; {left:,} sizes have no exact kernel." if left else ".")
    )


def parts(row: ModelRow) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, and what is left of it without a kernel."""
    if not row.split or row.ms is None:
        return {}
    idle = row.ms - sum(row.split.values())
    return {**row.split, **({IDLE: idle} if idle > 0 else {})}


def roof(rows: Sequence[OpRow]) -> list[tuple[float, float]]:
    """GB/s of a copy over megabytes: the median of sizes within 7% of each other, by size."""
    near: dict[int, list[OpRow]] = {}
    for row in rows:
        near.setdefault(round(math.log2(row.megabytes) * 10), []).append(row)
    return [
        (statistics.median(r.megabytes for r in group), statistics.median(r.roof for r in group))
        for _, group in sorted(near.items())
    ]
