"""The section about text generation: tokens per second of each configuration beside eager."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import Generation
from .markup import NONE, Html, joined, number, table, tag
from .rows import GenerationRow

NOTE = (
    "Language models that generate: tokens per second after the first token, and the time to the "
    "first. Tokens and bits of logits are compared with a run without injection that has the same "
    "cache; a static cache has other bits than a growing one."
)
HEAD = ("config", "tokens/s", "ms/token", "speed-up", "first token ms", "first call s")


def generation_section(found: Sequence[Generation]) -> list[Html]:
    """A table for each model and length."""
    pieces = [tag("p", NOTE, class_="note")]
    for one in found:
        rows = [figures(one, row) for row in one.rows]
        notes = [f"{row.config}: {row.failed}" for row in one.rows if row.failed]
        inside = [tag("h4", one.title), table([*HEAD, "tokens", "bits"], rows)]
        inside += [tag("p", text, class_="note") for text in notes]
        pieces.append(tag("article", joined(inside, "\n")))
    return pieces


def figures(one: Generation, row: GenerationRow) -> list[str]:
    """The cells of a row."""
    gain = one.speedup(row)
    return [
        row.config,
        number(row.tokens_per_s, ".1f"),
        number(row.ms, ".2f"),
        f"{gain:.2f}×" if gain else NONE,
        number(row.first_token_ms, ".1f"),
        number(row.first_call_s, ".1f"),
        _same(row.tokens_equal, row.eager_repeats),
        _same(row.equal, row.eager_repeats),
    ]


def _same(equal: bool | None, eager_repeats: bool) -> str:
    if equal is None or equal:
        return NONE if equal is None else "same"
    return "differ" if eager_repeats else "eager varies"
