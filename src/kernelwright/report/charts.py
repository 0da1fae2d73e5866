"""Charts as scalable SVGs; their colours are CSS variables of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Html, joined, tag


@dataclass(frozen=True)
class Piece:
    """A segment of a bar, in the units of its chart."""

    start: float
    length: float
    colour: str
    title: str


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart."""

    label: str
    value: str
    pieces: tuple[Piece, ...]


def bars(lines: Sequence[Bar], name: str, mark: float | None = None) -> Html:
    """Horizontal bars from 0, with label and value; `mark` draws a vertical line."""
    ends = [p.start + p.length for line in lines for p in line.pieces]
    scale = 100 / max([*ends, mark or 0])
    cells = []
    for line in lines:
        shapes = [
            tag(
                "rect",
                tag("title", p.title),
                x=f"{p.start * scale:.2f}%",
                width=f"{p.length * scale:.2f}%",
                height="100%",
                class_=f"fill-{p.colour}",
            )
            for p in line.pieces
        ]
        if mark is not None:
            x = f"{mark * scale:.2f}%"
            shapes.append(tag("line", x1=x, x2=x, y1="0", y2="100%", class_="mark"))
        cells += [
            tag("span", line.label, class_="label"),
            tag("svg", joined(shapes), class_="bar", aria_hidden="true"),
            tag("span", line.value, class_="value"),
        ]
    return tag("div", joined(cells), class_="bars", role="group", aria_label=name)


@dataclass(frozen=True)
class Dot:
    """One measured op: megabytes moved, GB/s reached."""

    megabytes: float
    bandwidth: float
    colour: str
    title: str


WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 36, 6, 22, 34


def roofline(dots: Sequence[Dot], roof: Sequence[tuple[float, float]], name: str) -> Html:
    """GB/s over megabytes (log scale); `roof` is the measured copy, by size."""
    sizes = [x for x, _ in roof] + [d.megabytes for d in dots]
    low, high = math.log2(min(sizes)) - 0.3, math.log2(max(sizes)) + 0.3
    fastest = max([y for _, y in roof] + [d.bandwidth for d in dots])
    step = nice_step(fastest / 5)
    top = step * math.ceil(fastest / step)

    def x(megabytes: float) -> float:
        return LEFT + (math.log2(megabytes) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(bandwidth: float) -> float:
        return TOP + (1 - bandwidth / top) * (HEIGHT - TOP - BOTTOM)

    shapes = []
    for n in range(round(top / step) + 1):
        height = f"{y(n * step):.1f}"
        shapes.append(
            tag("line", x1=f"{LEFT}", x2=f"{WIDTH - RIGHT}", y1=height, y2=height, class_="grid")
        )
        shapes.append(_text(LEFT - 6, y(n * step) + 3.5, f"{n * step:g}", "end"))
    for power in range(math.ceil(low), math.floor(high) + 1):
        shapes.append(_text(x(2.0**power), HEIGHT - BOTTOM + 15, f"{2.0**power:g}", "middle"))
    shapes.append(_text(WIDTH - RIGHT, HEIGHT - 4, "MB read and written", "end"))
    shapes.append(_text(LEFT - 6, TOP - 11, "GB/s", "end"))
    line = " ".join(f"{x(mb):.1f},{y(gb):.1f}" for mb, gb in roof)
    shapes.append(tag("polyline", points=line, class_="roof"))
    for dot in dots:
        place = {"cx": f"{x(dot.megabytes):.1f}", "cy": f"{y(dot.bandwidth):.1f}", "r": "3.2"}
        shapes.append(tag("circle", tag("title", dot.title), **place, class_=f"dot-{dot.colour}"))
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", joined(shapes), viewBox=box, class_="roofline", role="img", aria_label=name)


def legend(entries: Sequence[tuple[str, str]]) -> Html:
    """What each colour means: (colour, words)."""
    items = (
        tag("li", joined((tag("span", class_=f"swatch back-{colour}"), words)))
        for colour, words in entries
    )
    return tag("ul", joined(items), class_="legend")


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not below `rough`."""
    power = 10 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def _text(x: float, y: float, text: str, anchor: str) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
