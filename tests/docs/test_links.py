"""Links of README.md, docs/ and the skill lead to existing pages and headings."""

from pathlib import Path

import gen
import pytest
from blocks import ROOT, documents
from links import anchors, links

PAGES = {path: path.read_text(encoding="utf-8") for path in documents()}


def broken(path, text, known):
    """The broken links of a page."""
    for link in links(text):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        headings = anchors(known[target]) if target in known else set()
        if (target not in known and not target.exists()) or (anchor and anchor not in headings):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken(path, PAGES[path], PAGES)) == []


def test_links_of_pages_that_are_made_lead_somewhere():
    docs = ROOT / "docs"
    made = {docs / place: text for place, text in gen.pages()}
    known = PAGES | made
    assert {
        path: found for path, text in made.items() if (found := [*broken(path, text, known)])
    } == {}


def test_a_broken_link_is_found(tmp_path):
    text = (
        "# A b, c\n[x](#a-b-c) [y](#a-b) [z](none.md) `[code](none.md)`\n```\n[u](none.md)\n```\n"
    )
    path = tmp_path / "page.md"
    assert list(broken(path, text, {path: text})) == ["#a-b", "none.md"]
    assert list(broken(path, "[up](page.md#d)", {path: text})) == ["page.md#d"]
    assert list(broken(Path(path), '<img src="no.svg">', {path: ""})) == ["no.svg"]
