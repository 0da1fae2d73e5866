"""The fenced blocks of README.md, CONTRIBUTING.md, docs/ and the skill.

A block right below `<!-- gpu -->` is for a GPU only. How blocks are run: running.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKILL = ROOT / "src" / "kernelwright" / "skill"
GPU = "<!-- gpu -->"
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<language>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block, and the line on which it starts."""

    path: Path
    line: int
    language: str
    text: str
    gpu: bool

    @property
    def name(self) -> str:
        near = ROOT if self.path.is_relative_to(ROOT) else self.path.parent
        return f"{self.path.relative_to(near)}:{self.line}"


class Wrong(AssertionError):
    """A block names something that does not exist, or fails."""


def documents() -> list[Path]:
    """Every page that a reader may copy commands from."""
    tops = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return tops + sorted([*(ROOT / "docs").rglob("*.md"), *SKILL.rglob("*.md")])


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of one page; a fence that is never closed is an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opened["mark"]:
            end += 1
        if end == len(lines):
            raise Wrong(f"{path}:{number + 1}: this block has no end")
        text = "\n".join(line.removeprefix(opened["indent"]) for line in lines[number + 1 : end])
        marked = number > 0 and lines[number - 1].strip() == GPU
        yield Block(path, number + 1, opened["language"].strip(), text, marked)
        number = end + 1
