"""What an error says about a name that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Collection

FEW = 9


def suggestion(name: str, known: Collection[str], lists_them: str) -> str:
    """The names that are similar to `name`; else all if they are few; else what lists them.

    >>> suggestion("rmsnrom", ["rmsnorm", "geglu"], "kernelwright ops")
    'did you mean rmsnorm?'
    """
    scores = {candidate: _likeness(name.lower(), candidate.lower()) for candidate in known}
    # transposed and missing letters score above 0.6; leave out what is far behind the best
    best = max(scores.values(), default=0.0)
    near = [k for k, score in scores.items() if score >= max(0.6, best - 0.15)]
    if near:
        near.sort(key=lambda k: -scores[k])
        return f"did you mean {' or '.join(near[:3])}?"
    if len(known) <= FEW:
        return f"there are {', '.join(known)}"
    return f"`{lists_them}` lists them"


def _likeness(name: str, candidate: str) -> float:
    """From 0 to 1; the beginning of a name is close to it, however long the rest, and so is its
    first word misspelt: lama for llama-3-8b."""
    ratio = difflib.SequenceMatcher(None, name, candidate).ratio()
    if len(name) > 2 and candidate.startswith(name):
        return max(ratio, 0.8)
    word = difflib.SequenceMatcher(None, name, candidate.partition("-")[0]).ratio()
    return max(ratio, 0.75) if len(name) > 3 and word > 0.8 else ratio
