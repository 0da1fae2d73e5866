"""Profiles as tables for the terminal: time by category, longest kernels, counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..measure.cpu_caveat import caveats
from .categories import CATEGORIES, NOTE

TOP = 15
NAME_COLUMNS = 60
SOURCES = {1: "torch.profiler", 2: "nsys"}


def page(rows: Sequence[dict[str, Any]]) -> Group:
    """All tables, level by level."""
    parts: list[RenderableType] = []
    for level, source in SOURCES.items():
        found = [row for row in rows if row["level"] == level]
        if found:
            on_gpu = found[0]["device"] != "cpu"
            what = "kernels" if on_gpu else "ops, the CPU's times"
            parts += [_categories(found, f"Level {level}, {source}: {what}"), _kernels(found)]
            parts += [Text(line) for line in _lines(found)]
    if parts:
        parts.append(Text(NOTE, style="dim"))
    parts += [Text(text, style="yellow") for text in caveats(rows)]
    if counted := [row for row in rows if row["level"] == 3]:
        parts.append(_counters(counted))
        parts += [Text(f"{short_name(r['name'])} {r['grid']}: {r['advice']}") for r in counted]
    return Group(*parts)


def _categories(rows: Sequence[dict[str, Any]], title: str) -> Table:
    shown = Table(title=f"{rows[0]['model']}. {title}")
    shown.add_column("ms a forward")
    for row in rows:
        shown.add_column(row["config"], justify="right")
    for name in CATEGORIES:
        if any(row["categories"][name] for row in rows):
            shown.add_row(
                name, *(_share(row["categories"][name], row["kernel_ms"]) for row in rows)
            )
    shown.add_section()
    shown.add_row("all", *(f"{row['kernel_ms']:.2f}" for row in rows))
    shown.add_row("launches", *(str(row["launches"]) for row in rows))
    if all("wall_ms" in row for row in rows):
        shown.add_row("not profiled, with Python", *(f"{row['wall_ms']:.2f}" for row in rows))
    return shown


def _share(ms: float, whole: float) -> str:
    return f"{ms:.2f} {ms / whole:4.0%}" if whole else f"{ms:.2f}"


def _kernels(rows: Sequence[dict[str, Any]]) -> Table:
    """The longest kernels of each configuration, side by side."""
    by_config = [{k["name"]: k for k in row["kernels"]} for row in rows]
    names = {k["name"] for row in rows for k in row["kernels"][:TOP]}
    shown = Table(title="The longest: ms of all calls (calls)")
    shown.add_column("category", no_wrap=True)
    shown.add_column("name", overflow="fold")
    for row in rows:
        shown.add_column(row["config"], justify="right", no_wrap=True)

    def longest(name: str) -> float:
        return max(found[name]["ms"] for found in by_config if name in found)

    for name in sorted(names, key=longest, reverse=True)[:TOP]:
        kernels = [found.get(name) for found in by_config]
        kind = next(k["category"] for k in kernels if k)
        cells = (f"{k['ms']:.2f} ({k['calls']})" if k else "" for k in kernels)
        shown.add_row(kind, short_name(name), *cells)
    return shown


def _lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    for row in rows:
        if found := row.get("graph_breaks"):
            yield f"{row['config']}: graphs {found['graphs']}, graph breaks {found['breaks']}"
            yield from (f"  {n} × {reason}" for reason, n in found["reasons"].items())


def _counters(rows: Sequence[dict[str, Any]]) -> Table:
    configs = ", ".join(dict.fromkeys(row["config"] for row in rows))
    title = f"{rows[0]['model']} {configs}. Level 3, ncu: means over the launches of one forward"
    shown = Table(title=title, box=SIMPLE_HEAD, padding=0)
    several = "," in configs
    shown.add_column("kernel", overflow="fold")
    columns = ("calls", "µs", "DRAM\nGB/s", "of\npeak", "occupancy", "limiter")
    for column in (*(["config"] if several else []), "grid", *columns):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            short_name(row["name"]),
            *([row["config"]] if several else []),
            row["grid"],
            str(row["launches"]),
            _value(row["us"], ".1f"),
            _value(row["dram_gbs"], ".0f"),
            _value(row["dram_percent"], ".0f", "%"),
            f"{_value(row['occupancy'], '.0f')} of {_value(row['theoretical_occupancy'], '.0f')}%",
            row["limiter"] or "?",
        )
    return shown


def _value(number: float | None, form: str, unit: str = "") -> str:
    return "?" if number is None else f"{number:{form}}{unit}"


def short_name(name: str) -> str:
    """A kernel's name without PyTorch's common prefix, cut to the column."""
    bare = name.removeprefix("void ").replace("at::native::", "")
    return bare if len(bare) <= NAME_COLUMNS else bare[: NAME_COLUMNS - 1] + "…"
