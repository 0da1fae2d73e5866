"""Comparisons of two results on a GPU, whose outcome the host asks for when the forward has ended.

If it asked at once, it would wait for the GPU after every block of a model, and the GPU for the
host before the next. Whoever defers a comparison goes on with what is known to be right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import is_captured, pytree
from . import model_run
from .informative import Uninformative, informative
from .sites import equal


def compare(a: Any, b: Any, values: Sequence[Any], conclude: Callable[[bool, bool], None]) -> bool:
    """Call `conclude` with whether two results have the same bits, and whether these values prove
    it: at once, or when the forward of the model has ended. Whether that is known now."""
    flags = flags_of(a, b) if can_wait() else None
    if flags is None:
        same = equal(a, b)
        conclude(same, not same or informative(*values))
        return True
    looked = Uninformative()
    looked.look_at("", values)
    defer(Deferred(flags, [looked], conclude))
    return False


@dataclass
class Deferred:
    """One comparison: whether all of `flags` are true, and whether the values prove anything."""

    flags: Sequence[Tensor]
    values: Sequence[Uninformative]
    conclude: Callable[[bool, bool], None]  # called with both


def can_wait() -> bool:
    """Whether a comparison may be deferred: a model is running on a GPU, and nobody captures it."""
    active = model_run.active
    return active.at_end is not None and active.on_gpu and not is_captured()


def flags_of(a: Any, b: Any) -> list[Tensor] | None:
    """Of each pair of tensors in two results whether they have the same bits, where they are; None
    if they differ in more than values. Unlike `sites.equal` this takes NaN for different."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if len(ours) != len(theirs):
        return None
    flags = []
    for x, y in zip(ours, theirs, strict=True):
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            if type(x) is not type(y):
                return None
        elif x.dtype != y.dtype or x.shape != y.shape or x.device != y.device:
            return None
        elif x is not y:
            flags.append((x == y).all())
    return flags


def defer(found: Deferred) -> None:
    """Have a comparison concluded when the forward of the model ends."""
    active = model_run.active
    if active.deferred is None:
        assert active.at_end is not None
        active.deferred = []
        active.at_end.append(partial(_conclude, active.deferred))
    active.deferred.append(found)


def _conclude(deferred: Sequence[Deferred]) -> None:
    by_device = defaultdict(list)
    for found in deferred:
        for flag in found.flags:
            by_device[flag.device].append(flag)
    said = {d: iter(torch.stack(flags).tolist()) for d, flags in by_device.items()}
    for found in deferred:
        same = [next(said[flag.device]) for flag in found.flags]
        found.conclude(all(same), not any(found.values))
