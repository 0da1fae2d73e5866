"""Steps of a plan that need not run in every block or at every call: those made of inputs that all
blocks of a model are given, and those made of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = list[Any]


@dataclass(eq=False)
class Step:
    """One op or program: a function of the list of values, and the places it reads and writes."""

    run: Callable[[Values], None]
    reads: set[int]
    writes: set[int]
    product: bool = False  # whether it multiplies by a weight
    attends: bool = False
    layer: bool = False  # whether it calls a layer, which may have a memory
    only_early: bool = False  # left out if it would run in every block


def find_early(steps: list[Step], given: range, inputs: range) -> tuple[list[Step], list[int]]:
    """Steps that are made of what a block is `given` alone, of such that reaches no product; and
    the places of those. Other `inputs` belong to the block: weights, and what was made for it."""
    roots: dict[int, frozenset[int]] = {p: frozenset((p,)) for p in inputs}
    of_step: list[frozenset[int]] = []
    flowing: set[int] = set(inputs) - set(given)
    for step in steps:
        found = frozenset().union(*(roots.get(p, frozenset()) for p in step.reads))
        of_step.append(found)
        for place in step.writes:
            # what leaves an attention is an activation, whatever its mask and angles were
            roots[place] = frozenset() if step.attends else roots.get(place, frozenset()) | found
        if step.product:
            flowing |= found
    if not any(step.product for step in steps):
        return [], []
    pairs = list(zip(steps, of_step, strict=True))
    early = _closed([s for s, found in pairs if found and not found & flowing], steps)
    places = set().union(*(found for s, found in pairs if s in early))
    return early, sorted(places)


def find_prompts(
    steps: list[Step], early: list[Step], given: range, inputs: range, outputs: set[int]
) -> dict[int, list[Step]]:
    """For each input that is `given` and reaches the `outputs` through attention alone, the steps
    that are made of it and of weights, if a product is one of them. Weights are the first of all
    `inputs`; the last ones were made for this call."""
    made_of: dict[int, frozenset[int]] = {
        p: frozenset((p,)) for p in range(given.start, inputs.stop)
    }
    direct = dict(made_of)  # the inputs that reach a place by another way than attention
    found: dict[int, list[Step]] = {}
    for step in steps:
        roots = frozenset().union(*(made_of.get(p, frozenset()) for p in step.reads))
        ways = frozenset().union(*(direct.get(p, frozenset()) for p in step.reads))
        for place in step.writes:
            made_of[place] = made_of.get(place, frozenset()) | roots
            direct[place] = direct.get(place, frozenset()) | (frozenset() if step.attends else ways)
        if len(roots) == 1 and step not in early and not step.layer and not step.attends:
            (root,) = roots
            found.setdefault(root, []).append(step)
    escaped = frozenset().union(*(direct.get(p, frozenset()) for p in outputs))
    kept = [p for p in found if p in given and p not in escaped]
    closed = {p: _closed(found[p], steps) for p in kept}
    return {p: own for p, own in closed.items() if any(s.product for s in own)}


def _closed(chosen: list[Step], steps: list[Step]) -> list[Step]:
    """Those of the chosen steps that neither read nor write what other steps write: a value that is
    kept must not be written to."""
    while True:
        others = set().union(*(s.writes for s in steps if s not in chosen))
        rest = [s for s in chosen if not (s.writes | s.reads) & others]
        if len(rest) == len(chosen):
            return rest
        chosen = rest
