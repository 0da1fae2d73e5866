"""How injected modules run in a thread: eager or fused, and their fused places compared or not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Forward = Callable[..., Any]
NOTHING: dict[str, str] = {}
DIFFERS = "differs from eager's"
NO_MEMORY = "there was no memory for a second run beside it"


class _Pass(threading.local):
    """How injected modules behave in this thread, now."""

    eager = False  # as if nothing were injected
    inside = False  # inside a forward of ours: what is called from it needs no check of its own
    comparing = False  # try each site against eager
    eight_bits = True  # off while a module is held to what "fused" promises
    off: dict[str, str] = NOTHING  # sites of the running module that stay eager, and why
    notes: Counter[tuple[str, str]] | None = None  # what became of each site, while somebody asks


current = _Pass()


@contextmanager
def set_now(**values: Any) -> Iterator[None]:
    """While this lasts, injected modules of this thread behave so."""
    before = {name: getattr(current, name) for name in values}
    for name, value in values.items():
        setattr(current, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)


def eagerly() -> Any:
    """While this lasts, injected modules run their own forward."""
    return set_now(eager=True, comparing=False, off=NOTHING, notes=None)


def equal(a: Any, b: Any) -> bool:
    """torch.equal, over whatever a forward returns."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b)


def site(name: str, eager: Callable[[], Any], kernel: Callable[[], Any]) -> Any:
    """One fused place of a forward: the kernel, unless first sight found that it cannot run here or
    differs from eager."""
    if torch.compiler.is_compiling():
        return kernel()
    if current.off and name in current.off:
        return eager()
    if current.notes is None:
        return kernel()
    try:
        result = kernel()
    except ValueError as no:  # an op says so before it launches anything
        current.off[name] = str(no)
        return eager()
    current.notes[name, "fused"] += 1
    if not current.comparing:
        return result
    with set_now(comparing=False, notes=None):
        try:
            expected = eager()
            if equal(result, expected):
                return result
            why = DIFFERS
        except torch.OutOfMemoryError:
            result, expected, why = None, None, NO_MEMORY
        if expected is None:
            expected = eager()
    current.off[name] = why
    return expected


def declined(name: str, why: str) -> None:
    """A place that could be fused and is not, because of what it was given."""
    if not torch.compiler.is_compiling() and current.notes is not None:
        current.notes[name, why] += 1
