"""Prints tables that may be wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

GROUPED = "model"


def show(table: Table, notes: Iterable[Text] = ()) -> None:
    """Print a table with all of its columns, and lines below it. On a terminal that is too narrow
    it is printed in parts that fit, one below the other; a file or a pipe gets full lines."""
    console = Console()
    needed = width(table, console)
    if console.is_terminal and needed > console.width:
        for part in parts(table, console):
            console.print(part)
    else:
        Console(width=max(console.width, needed)).print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def width(table: Table, console: Console) -> int:
    """The columns of the terminal that it takes without a line wrapped."""
    return console.measure(table, options=console.options.update(width=1000)).maximum


def parts(table: Table, console: Console) -> Iterator[Table]:
    """The same rows with words of the heads below each other and models as lines of their own; the
    columns that do not fit follow in tables below, each with the first column again."""
    first, *others = table.columns
    names = [str(cell) for cell in first.cells]
    if first.header == GROUPED:
        first, *others = others
    else:
        names = [""] * len(names)
    shown: list[Column] = []
    for column in others:
        part = _of(table, names, [first, *shown, column])
        if shown and width(part, console) > console.width:
            yield _of(table, names, [first, *shown])
            shown = []
        shown.append(column)
    yield _of(table, names, [first, *shown])


def _of(table: Table, names: Sequence[str], columns: Sequence[Column]) -> Table:
    part = Table(
        title=table.title,
        title_justify=table.title_justify,
        box=table.box,
        padding=table.padding,
        pad_edge=False,
    )
    for column in columns:
        part.add_column(str(column.header).replace(" ", "\n"), justify=column.justify)
    cells = zip(*(column.cells for column in columns), strict=True)
    before = ""
    for name, row, values in zip(names, table.rows, cells, strict=True):
        if name != before:
            part.add_row(Text(name, style="bold"))
            before = name
        part.add_row(*values, style=row.style)
    return part
