"""The table of `kernelwright inspect`: every place of a model that could be fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .record import Record
from .table import fate, short_kind

OTHER_COLUMNS = 15  # count, and the lines between columns
LEAST = 24


@dataclass(frozen=True)
class Architecture:
    """One row for each place, with names that fit the terminal and stay apart."""

    report: Record

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        report = self.report
        table = Table(title=f"{report.target}, numerics={report.numerics!r}", title_justify="left")
        table.add_column("module and class", no_wrap=True)
        table.add_column("count", justify="right")
        table.add_column("what inject does with it", overflow="fold")
        places = [".".join(p for p in (n.component, n.where) if p) for n in report.lines]
        names = shortened(
            [place or "the model" for place in places],
            max(LEAST, (options.max_width - OTHER_COLUMNS) * 3 // 5),
        )
        for name, (line, count) in zip(names, report.lines.items(), strict=True):
            weight = {True: ", weight", False: ", no weight", None: ""}[line.weight]
            kind = Text(f"  {short_kind(line.kind)}{weight}", style="dim", overflow="ellipsis")
            table.add_row(
                Text(name).append("\n").append_text(kind),
                str(count),
                fate(line.replaced_by, line.left_alone),
                style=None if line.replaced_by else "dim",
            )
        yield table


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names of at most `width` characters, cut in the middle; two names that differ stay apart, if
    need be with more characters.

    >>> shortened(["blocks.*.attn1.norm_q", "blocks.*.attn1.norm_k", "rope"], 15)
    ['block….norm_q', 'block….norm_k', 'rope']
    """
    for room in range(width, max(map(len, names), default=0) + 1):
        for head in range(max(2, room // 3), 1, -1):
            cut = [_cut(name, room, head) for name in names]
            if len(set(cut)) == len(set(names)):
                return cut
    return list(names)


def _cut(name: str, room: int, head: int) -> str:
    """`head` characters, an ellipsis, and as many whole parts of the end as there is room for."""
    if len(name) <= room:
        return name
    tail = name[len(name) - (room - head - 1) :]
    whole = tail.find(".")
    return f"{name[:head]}…{tail[whole:] if whole >= 0 else tail}"
