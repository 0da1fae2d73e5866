"""A docstring on a terminal: lines as wide as the terminal, arguments with a hanging indent."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

# what begins a line of its own: an example and its output, an item, a row of a table
KEPT = (">>>", "...", "-", "|")


def wrapped(doc: str, width: int) -> str:
    """The same words in lines of at most `width` characters.

    >>> print(wrapped("Args:\\n    x: one two three\\n        four", 18))
    Args:
        x: one two
            three four
    """
    return "\n".join(
        line for paragraph in re.split(r"\n\s*\n", doc) for line in (*_lines(paragraph, width), "")
    ).rstrip("\n")


def _lines(paragraph: str, width: int) -> Iterator[str]:
    lines = paragraph.splitlines()
    if any(line.lstrip().startswith(KEPT) for line in lines):
        yield from lines
        return
    for line in _joined(lines):
        indent = re.match(" *", line)
        assert indent is not None
        hanging = indent[0] and f"{indent[0]}    "
        yield textwrap.fill(
            line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )


def _joined(lines: list[str]) -> list[str]:
    """Each argument and each paragraph of prose in one line; a heading such as `Args:` alone."""
    found: list[str] = []
    for line in lines:
        indented, inside = line.startswith("    "), bool(found) and found[-1].startswith("    ")
        prose = bool(found) and not indented and not inside and not found[-1].endswith(":")
        if line.startswith("        ") or prose:
            found[-1] = f"{found[-1]} {line.strip()}"
        else:
            found.append(line)
    return found
