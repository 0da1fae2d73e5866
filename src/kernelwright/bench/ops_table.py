"""What `kernelwright bench ops` shows of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..measure.cpu_caveat import caveats
from .op_row import EXACT
from .ops import failures

NONE = "–"


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    """A line for each case, grouped by op, and a column for each peer."""
    on_gpu = rows[0]["device"] == "cuda"
    if on_gpu:
        title = "GPU µs: one graph replay over rotated buffers. × is how much faster than a peer."
    else:
        title = "wall µs on the CPU. × is how much faster than a peer."
    exact = any(w.startswith(EXACT) for r in rows for w in r["gpu_us"])
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    times = ("GPU µs", "host µs") if on_gpu else ("wall µs",)
    more = ("exact µs",) if exact else ()
    shown.add_column("case")
    shown.add_column("kernel")
    for head in ("MB", *times, "GB/s", "of copy", *more, *columns, "error", "eager's"):
        shown.add_column(head, justify="right", no_wrap=True)
    several = len({r["dtype"] for r in rows}) > 1
    before = None
    for row in rows:
        if row["op"] != before:
            shown.add_row(Text(row["op"], style="bold"))
            before = row["op"]
        shown.add_row(*_cells(row, columns, exact, several), style="red" if row["failed"] else None)
    return shown


def page(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> RenderableType:
    """The table, and the notes below it."""
    return Group(table(rows, columns), *notes(rows))


def notes(rows: Sequence[dict[str, Any]]) -> list[Text]:
    """What was not timed, and why; and the caveat of a CPU."""
    lines = [Text(line, style="red") for line in failures(rows)]
    lines += [
        Text(f"no time: {row['op']} {row['case']}, {way}: {why}", style="dim")
        for row in rows
        for way, why in row["not_covered"].items()
    ]
    return lines + [Text(text, style="yellow") for text in caveats(rows)]


def _cells(row: dict[str, Any], columns: Sequence[str], exact: bool, several: bool) -> list[str]:
    on_gpu, way = row["device"] == "cuda", row["chosen"]
    us = row["gpu_us"] if on_gpu else row["wall_us"]
    cells = [f"  {row['case']} {row['dtype']}" if several else f"  {row['case']}", way]
    cells += [_number(row["megabytes"], ".3g"), _number(us.get(way), ".1f")]
    if on_gpu:
        cells.append(_number(row["host_us"].get(way), ".1f"))
    cells += [_number(row["gb_s"].get(way), ".3g"), _number(row["of_copy"].get(way), ".0%")]
    if exact:
        slowest = max((t for w, t in us.items() if w.startswith(EXACT)), default=None)
        cells.append(_number(slowest, ".1f"))
    for column in columns:
        faster = row["over"].get(column)
        cells.append(NONE if faster is None else f"{faster:.2f}×")
    return [*cells, _number(row["error"].get(way), ".1e"), _number(row.get("eager_error"), ".1e")]


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"
