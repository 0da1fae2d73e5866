"""The report of an injection: its record, which prints as a table."""

from __future__ import annotations

import io
from typing import Any

from . import table
from .record import Record


class Report(Record):
    """What an injection did: what was replaced by what, what was left alone and why, and, once the
    model has run, what the comparison with eager showed. It prints as a table."""

    def as_plan(self) -> Report:
        self.planned = True
        return self

    @property
    def summary(self) -> str:
        """One line: how many modules, and what the comparison with eager showed."""
        return table.summary(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None, legacy_windows=False)
        console.print(self)
        return text.getvalue().rstrip()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from table.render(self)
