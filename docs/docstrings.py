"""How mkdocstrings reads our docstrings: an extension of griffe.

An example stands at the end of a docstring without a heading, and an op's docstring opens with its
formula: both become Markdown that shows them as code.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension

OPS = "kernelwright.ops."


class Docstrings(Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None or obj.is_alias:
            return
        text = with_heading(obj.docstring.value)
        if obj.is_function and obj.canonical_path.startswith(OPS):
            text = with_formula(text)
        obj.docstring.value = text


def with_heading(text: str) -> str:
    """The lines from the first `>>>` on under the heading of an example."""
    before, mark, example = text.partition(">>>")
    if not mark or "Examples:" in before:
        return text
    lines = f"{mark}{example}".rstrip().splitlines()
    return "\n".join([before.rstrip(), "", "Examples:", *(f"    {line}" for line in lines)])


def with_formula(text: str) -> str:
    """The first line as code, if it is a formula."""
    first, line, rest = text.partition("\n")
    if "=" not in first or "`" in first:
        return text
    formula, dot, words = first.partition(", over ")
    said = f"`{formula.rstrip('.')}`{dot}{words}"
    return f"{said}{line}{rest}"
