"""Result files of a kind that has no section of its own: their rows as a plain table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .markup import NONE, Html, table, tag
from .reading import Results


def others_section(file: Results) -> list[Html]:
    """One table of all rows; a nested object becomes a column for each of its keys."""
    rows = [dict(_cells(row)) for row in file.others]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    words = [c for c in columns if any(isinstance(row.get(c), str) for row in rows)]
    head = [*words, *(c for c in columns if c not in words)]
    lines = [[_shown(row.get(column)) for column in head] for row in rows]
    return [tag("h3", file.kind.capitalize()), table(head, lines, words=len(words))]


def _cells(row: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _cells(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", value


def _shown(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:.4g}" if isinstance(value, float) else str(value)
