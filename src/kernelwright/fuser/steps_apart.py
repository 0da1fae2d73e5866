"""Steps of a plan that need not run in every block or at every call: those made of inputs that all
blocks of a model are given, and those made of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
    remembers: bool = False  # whether it may do more than compute: a layer's hook, a cache
    only_early: bool = False  # left out if it would run in every block


def find_early(
    steps: list[Step],
    given: range,
    inputs: range,
    of_samples: Collection[int] = (),
    held: Collection[int] = (),
) -> tuple[list[Step], list[int]]:
    """Steps that are made of what a block is `given` alone, of such that reaches no product; and
    the places of those. Other `inputs` belong to the block: weights, and what was made for it; so
    do tensors that it has `held` beside them.

    What has a number for each sample of a batch (`of_samples`), such as the time, is the same in
    all blocks even where a product reads it, or what was made of it."""
    activation = -1  # the root of what leaves an attention, whatever its mask and angles were
    roots: dict[int, frozenset[int]] = {p: frozenset((p,)) for p in (*inputs, *held)}
    of_step: list[frozenset[int]] = []
    flowing: set[int] = {activation, *inputs, *held} - set(given)
    for step in steps:
        found = frozenset().union(*(roots.get(p, frozenset()) for p in step.reads))
        of_step.append(found)
        for place in step.writes:
            made = frozenset((activation,)) if step.attends or step.product else found
            roots[place] = roots.get(place, frozenset()) | made
        if step.product:
            flowing |= found - set(of_samples)
    if not any(step.product for step in steps):
        return [], []
    pairs = list(zip(steps, of_step, strict=True))
    # a step that reads nothing makes a constant, which others may need
    free = [s for s, found in pairs if not found & flowing and not (s.product or s.attends)]
    early = _needed(_closed(free, steps), {s for s, found in pairs if found})
    places = set().union(*(found for s, found in pairs if s in early))
    return early, sorted(places)


def _needed(early: list[Step], wanted: set[Step]) -> list[Step]:
    """The wanted ones of these steps, and what they read."""
    kept: list[Step] = []
    reads: set[int] = set()
    for step in reversed(early):
        if step in wanted or step.writes & reads:
            kept.append(step)
            reads |= step.reads
    return kept[::-1]


def find_prompts(
    steps: list[Step],
    early: list[Step],
    given: range,
    inputs: range,
    outputs: set[int],
    held: Collection[int] = (),
) -> dict[int, list[Step]]:
    """For each input that is `given` and reaches the `outputs` through attention alone, the steps
    that are made of it and of weights, if a product is one of them. Weights are the first of all
    `inputs`; the last ones were made for this call. Nobody asks whether tensors that are `held`
    beside weights have changed."""
    made_of: dict[int, frozenset[int]] = {
        p: frozenset((p,)) for p in (*range(given.start, inputs.stop), *held)
    }
    direct = dict(made_of)  # the inputs that reach a place by another way than attention
    found: dict[int, list[Step]] = {}
    for step in steps:
        roots = frozenset().union(*(made_of.get(p, frozenset()) for p in step.reads))
        ways = frozenset().union(*(direct.get(p, frozenset()) for p in step.reads))
        for place in step.writes:
            made_of[place] = made_of.get(place, frozenset()) | roots
            direct[place] = direct.get(place, frozenset()) | (frozenset() if step.attends else ways)
        if len(roots) == 1 and step not in early and not step.remembers and not step.attends:
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
