"""The waterfall chart: the milliseconds that each part of a step gained or lost."""

from __future__ import annotations

from collections.abc import Iterable

from .charts import Bar, Piece, bars, legend
from .figures import IDLE, Step
from .markup import Html, joined, tag

PART_COLOURS = 8
# a part that changed less than this gets no line: steps take tens of milliseconds
NOTHING_MS = 0.005


def waterfall(title: str, steps: tuple[Step, Step]) -> Html:
    """The step before, the change of each part, and the step after; totals only without parts."""
    before, after = steps
    heading = tag("h5", f"One step, {before.config} to {after.config}")
    name = f"{title}: milliseconds of one step before and after"
    if not before.parts or not after.parts:
        whole = [
            Bar(before.config, _ms(before.ms), (Piece(0, before.ms, "eager", _ms(before.ms)),)),
            _change("change", before.ms, after.ms),
            Bar(after.config, _ms(after.ms), (Piece(0, after.ms, "exact", _ms(after.ms)),)),
        ]
        words = "Total time only: the file has no split by kernel."
        return joined((heading, bars(whole, name), tag("p", words, class_="note")))
    names = [
        part
        for part in dict.fromkeys([*before.parts, *after.parts])
        if max(before.parts.get(part, 0.0), after.parts.get(part, 0.0)) > NOTHING_MS
    ]
    colours = part_colours(names)
    level = sum(before.parts.values())
    lines = [Bar(before.config, _ms(before.ms), stacked(before.parts, colours, "ms"))]
    for part in names:
        moved = level + after.parts.get(part, 0.0) - before.parts.get(part, 0.0)
        lines.append(_change(part, level, moved))
        level = moved
    lines.append(Bar(after.config, _ms(after.ms), stacked(after.parts, colours, "ms")))
    return joined((heading, bars(lines, name), legend([(colours[p], p) for p in names])))


def part_colours(names: Iterable[str]) -> dict[str, str]:
    kernels = [n for n in names if n != IDLE]
    colours = {n: f"part{k % PART_COLOURS}" for k, n in enumerate(kernels)}
    return {**colours, IDLE: "idle"}


def stacked(split: dict[str, float], colours: dict[str, str], unit: str) -> tuple[Piece, ...]:
    """The parts of one bar, end to end."""
    pieces, start = [], 0.0
    for part, length in split.items():
        if part in colours and length > 0:
            pieces.append(Piece(start, length, colours[part], f"{part} {length:.1f} {unit}"))
        start += length
    return tuple(pieces)


def _change(label: str, old: float, new: float) -> Bar:
    text = f"{round(new - old, 1) + 0.0:+.1f} ms".replace("-", "−")
    colour = "gain" if new <= old else "bad"
    return Bar(label, text, (Piece(min(old, new), abs(new - old), colour, f"{label} {text}"),))


def _ms(value: float) -> str:
    return f"{value:.1f} ms"
