"""Result files of other kinds: what exact modes were compared with, and rows as a plain table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .markup import NONE, Html, table, tag
from .reading import Results

TITLES = {"first": "Time to the first result", "hub": "Host time of a call, Hub package"}


def others_section(file: Results) -> list[Html]:
    """One table of all rows; a nested object becomes a column for each of its keys."""
    if file.kind == "calibration":
        return _calibration(file)
    rows = [dict(_cells(row)) for row in file.others]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    words = [c for c in columns if any(isinstance(row.get(c), str) for row in rows)]
    head = [*words, *(c for c in columns if c not in words)]
    lines = [[_shown(row.get(column)) for column in head] for row in rows]
    return [
        tag("h3", TITLES.get(file.kind, file.kind.capitalize())),
        table(head, lines, words=len(words)),
    ]


def _calibration(file: Results) -> list[Html]:
    """Sums and functions of PyTorch that exact modes repeat, as `doctor --exact` compared them."""
    head = ["of PyTorch", "repeated by", "used by", "elements compared", "differ"]
    lines = [
        [
            _shown(row.get("subject")),
            row.get("way") or "no kernel: runs eager",
            ", ".join(row.get("chains") or ()) or NONE,
            _count(row.get("compared")),
            _count(row.get("differing")),
        ]
        for row in file.others
    ]
    about = f"torch {file.environment.pytorch}"
    note = f"Bits of the installed PyTorch ({about}), compared by `kernelwright doctor --exact`."
    return [
        tag("h3", "Calibration of exact modes"),
        tag("p", note, class_="note"),
        table(head, lines, words=3),
    ]


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else NONE


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
