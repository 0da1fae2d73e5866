"""A model's step before and after: where the milliseconds went."""

from __future__ import annotations

from collections.abc import Sequence

from .charts import Bar, Piece, bars, legend
from .figures import IDLE, Model, parts
from .markup import Html, joined, tag

PART_COLOURS = 4
IDLE_COLOUR = "part4"


def waterfall(model: Model) -> Html:
    """Eager, what each kind of kernel gained or cost, and the exact run; totals without a split."""
    before, after = model.row("eager"), model.after
    if not (before and after and before.ms and after.ms):
        return Html("")
    old, new = parts(before), parts(after)
    heading = tag("h5", f"One step, eager to {after.config}")
    name = f"{model.title}: milliseconds of one step before and after"
    if not old or not new:
        whole = [
            Bar("eager", _ms(before.ms), (Piece(0, before.ms, "eager", _ms(before.ms)),)),
            _change("change", before.ms, after.ms),
            Bar(after.config, _ms(after.ms), (Piece(0, after.ms, "exact", _ms(after.ms)),)),
        ]
        words = "Total time only: the file has no split by kernel."
        return joined((heading, bars(whole, name), tag("p", words, class_="note")))
    names = list(dict.fromkeys([*old, *new]))
    colours = _colours(names)
    level = sum(old.values())
    lines = [Bar("eager", _ms(before.ms), _stacked(old, colours))]
    for part in names:
        moved = level + new.get(part, 0.0) - old.get(part, 0.0)
        lines.append(_change(part, level, moved))
        level = moved
    lines.append(Bar(after.config, _ms(after.ms), _stacked(new, colours)))
    return joined((heading, bars(lines, name), legend([(colours[p], p) for p in names])))


def _colours(names: Sequence[str]) -> dict[str, str]:
    kernels = [n for n in names if n != IDLE]
    colours = {n: f"part{k % PART_COLOURS}" for k, n in enumerate(kernels)}
    return {**colours, IDLE: IDLE_COLOUR}


def _stacked(split: dict[str, float], colours: dict[str, str]) -> tuple[Piece, ...]:
    pieces, start = [], 0.0
    for part, ms in split.items():
        pieces.append(Piece(start, ms, colours[part], f"{part} {_ms(ms)}"))
        start += ms
    return tuple(pieces)


def _change(label: str, old: float, new: float) -> Bar:
    text = f"{new - old:+.1f} ms".replace("-", "−")
    colour = "gain" if new <= old else "bad"
    return Bar(label, text, (Piece(min(old, new), abs(new - old), colour, f"{label} {text}"),))


def _ms(value: float) -> str:
    return f"{value:.1f} ms"
