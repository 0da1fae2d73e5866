"""HTML of the page: style, tags and tables. Text that is not `Html` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

NONE = "–"
STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


class Html(str):
    """Text that is HTML already."""


def safe(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(text))


def tag(name: str, content: str = "", **attributes: str) -> Html:
    """`<name attribute="value">content</name>`; `class_` is `class`, `stroke_width` has a dash."""
    pairs = (f' {k.rstrip("_").replace("_", "-")}="{safe(v)}"' for k, v in attributes.items())
    return Html(f"<{name}{''.join(pairs)}>{safe(content)}</{name}>")


def joined(pieces: Iterable[str], between: str = "") -> Html:
    return Html(between.join(safe(piece) for piece in pieces))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Html:
    """A table that scrolls sideways; all but the first `words` columns are figures."""

    def line(cells: Sequence[str], name: str) -> Html:
        kinds = ("word" if column < words else "figure" for column in range(len(cells)))
        return tag("tr", joined(tag(name, c, class_=k) for c, k in zip(cells, kinds, strict=True)))

    top = tag("thead", line(head, "th"))
    body = tag("tbody", joined((line(cells, "td") for cells in rows), "\n"))
    return tag("div", tag("table", joined((top, body))), class_="scroll", tabindex="0")


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
