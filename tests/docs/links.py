"""Links and headings of Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

FENCED = re.compile(r"^ *(```+|~~~+).*?^ *\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """The links of a page within the documentation."""
    for found in LINK.finditer(INLINE.sub("", FENCED.sub("", text))):
        target = found[1] or found[2]
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of its headings, as both GitHub and mkdocs generate them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(FENCED.sub("", text))
    }
