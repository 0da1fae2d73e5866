"""Differences of two runs: times, memory, bits, and rows that are gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..measure.cpu_caveat import CAVEAT
from ..video.settings import CONTROL
from .json_values import Unreadable
from .reading import Results
from .rows import CPU, CountedRow


@dataclass(frozen=True)
class Reading:
    """The figures of one row, where less is better, and what must not get worse."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    equal: bool | None = None
    mismatches: int | None = None
    missing: str | None = None  # why it has no figure


@dataclass(frozen=True)
class Change:
    """One row that got better or worse; `percent` is None where no figure changed."""

    row: str
    what: str
    old: str
    new: str
    percent: float | None
    regression: bool


@dataclass(frozen=True)
class Comparison:
    """All changes over `threshold` percent. Of the `rows` that both runs have, one that got worse
    in anything is worse; `lost` are in the old run alone, `added` in the new one alone."""

    threshold: float
    rows: int
    worse: int
    better: int
    lost: int
    added: int
    changes: list[Change]
    notes: list[str]

    @property
    def regressions(self) -> list[Change]:
        return [c for c in self.changes if c.regression]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "regressions": len(self.regressions)}


def compare(old: Iterable[Results], new: Iterable[Results], threshold: float) -> Comparison:
    """Compare `new` with `old`: worse by more than `threshold` percent, or gone, is a regression.

    Rows are matched by model, configuration, sizes and dtype, or by op, case, dtype and backend;
    videos also by steps and guidance, kernels that ncu counted also by grid; all also by GPU or by
    PyTorch where a run has several.
    """
    old, new = list(old), list(new)
    gpus = _named(_gpu, old, new)
    torches = _named(_torch, old, new)
    by = [name for name, found in ((_gpu, gpus), (_torch, torches)) if max(map(len, found)) > 1]
    before, after = _readings(old, by), _readings(new, by)
    common = before.keys() & after.keys()
    if not common:
        raise Unreadable("OLD and NEW have no row in common; give two runs of the same benchmark")
    changed = [
        [
            c
            for c in _changes(before[key], after[key])
            if c.percent is None or abs(c.percent) > threshold
        ]
        for key in before
        if key in common
    ]
    worse = sum(any(c.regression for c in row) for row in changed)
    better = sum(bool(row) for row in changed) - worse
    changes = [c for row in changed for c in row]
    changes.sort(key=lambda c: (not c.regression, -abs(c.percent or math.inf), c.row))
    lost = [reading for key, reading in before.items() if key not in common]
    added = len(after) - len(common)
    changes += [Change(reading.name, "row", "there", "lost", None, True) for reading in lost]
    counts = (len(common), worse, better, len(lost), added)
    return Comparison(threshold, *counts, changes, _notes(gpus, changes))


def _notes(gpus: list[list[str]], changes: list[Change]) -> list[str]:
    notes = [CAVEAT] if CPU in gpus[0] + gpus[1] else []
    if gpus[0] != gpus[1]:
        notes.append(f"not the same GPU: {', '.join(gpus[0])} before, {', '.join(gpus[1])} now")
    if any(c.row.endswith(" eager") and c.percent is not None for c in changes):
        notes.append("eager itself changed: look at the machine before the kernels")
    return notes


def _gpu(file: Results) -> str:
    return file.environment.device


def _torch(file: Results) -> str:
    return file.environment.pytorch


def _named(name: Callable[[Results], str], *runs: list[Results]) -> list[list[str]]:
    return [sorted({name(file) for file in files}) for files in runs]


def _readings(
    files: list[Results], by: Sequence[Callable[[Results], str]]
) -> dict[tuple[Any, ...], Reading]:
    found: dict[tuple[Any, ...], Reading] = {}
    origin: dict[tuple[Any, ...], Results] = {}
    for file in files:
        where = tuple(name(file) for name in by)
        for row_key, reading in _rows(file):
            key = (*row_key, where)
            if key in found:
                both = dict.fromkeys((str(origin[key].path), str(file.path)))
                raise Unreadable(f"{' and '.join(both)}: {reading.name} twice; give one of them")
            found[key], origin[key] = reading, file
    return found


def _rows(file: Results) -> Iterator[tuple[tuple[Any, ...], Reading]]:
    for m in file.models:
        figures = _known({"ms": m.ms, "GiB": m.peak_gib})
        name = f"{m.workload.title} {m.config}"
        yield m.key, Reading(name, figures, equal=m.equal, missing=m.failed)
    for t in file.training:
        figures = _known({"ms": t.ms, "GiB": t.gib})
        name = f"training {t.title} {t.config}"
        yield t.key, Reading(name, figures, equal=t.equal, missing=t.failed)
    for g in file.generation:
        figures = _known({"ms/token": g.ms, "first token ms": g.first_token_ms})
        yield g.key, Reading(f"{g.title} {g.config}", figures, equal=g.equal, missing=g.failed)
    for v in file.video:
        if v.config != CONTROL:
            figures = _known({"total s": v.total_s, "step s": v.step_s, "GiB": v.gib})
            name = f"video {v.title} {v.config}"
            yield v.key, Reading(name, figures, equal=v.equal, missing=v.failed)
    for p in file.profile:
        if isinstance(p, CountedRow):
            name = f"{p.workload.title} {p.config} {p.name} {p.grid}"
            yield p.key, Reading(name, _known({"µs": p.us}))
        else:
            name = f"profile {p.workload.title}, level {p.level}, {p.config}"
            yield p.key, Reading(name, {"kernel ms": p.kernel_ms})
    for o in file.ops:
        for way, us in o.us.items():
            yield o.key(way), Reading(f"{o.op} {o.case} {o.dtype} {way}", {"GPU µs": us})
    for e in file.exact:
        name = f"{e.op} {e.chain} {e.dtype} {e.rows}×{e.width}"
        missing = "no kernel" if e.mismatches is None else None
        yield e.key, Reading(name, mismatches=e.mismatches, missing=missing)


def _known(figures: dict[str, float | None]) -> dict[str, float]:
    return {what: value for what, value in figures.items() if value is not None}


def _changes(old: Reading, new: Reading) -> Iterator[Change]:
    if old.missing or new.missing:
        if bool(old.missing) != bool(new.missing):
            states = old.missing or "measured", new.missing or "measured"
            yield Change(new.name, "result", *states, None, bool(new.missing))
        return
    for what in old.figures.keys() & new.figures.keys():
        before, after = old.figures[what], new.figures[what]
        percent = (after / before - 1) * 100 if before else 0.0
        yield Change(new.name, what, _figure(before), _figure(after), percent, percent > 0)
    if old.equal is not None and old.equal != new.equal:
        words = {True: "equal", False: "no longer equal" if old.equal else "differ"}
        yield Change(new.name, "bits", words[old.equal], words[bool(new.equal)], None, old.equal)
    if old.mismatches != new.mismatches:
        worse = (new.mismatches or 0) > (old.mismatches or 0)
        counts = str(old.mismatches), str(new.mismatches)
        yield Change(new.name, "mismatches", *counts, None, worse)


def _figure(value: float) -> str:
    return f"{value:.4g}"
