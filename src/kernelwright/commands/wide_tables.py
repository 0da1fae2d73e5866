"""Prints tables that may be wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(table: Table, notes: Iterable[Text] = ()) -> None:
    """Print a table with all of its columns, and lines below it. A terminal that is too narrow
    wraps them; a file or a pipe gets full lines."""
    console = Console()
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(width=max(console.width, needed)).print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
