"""How injected modules run in a thread: eager or fused, and their fused places compared or not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree

Forward = Callable[..., Any]
NOTHING: dict[Any, Any] = {}
DIFFERS = "differs from eager's"
NO_MEMORY = "there was no memory for a second run beside it"
# an operand with a smaller share of non-zeros cannot tell two orders of summation apart
TELLING = 1 / 16


class NotHere(RuntimeError):
    """A backend that the person asked for by name cannot run where the model is."""


class _Pass(threading.local):
    """How injected modules behave in this thread, now."""

    eager = False  # as if nothing were injected
    inside = False  # inside a forward of ours: what is called from it needs no check of its own
    members: frozenset[int] = frozenset()  # the modules that this is about, by id
    comparing = False  # try each site against eager
    fp8 = True  # off while a module is held to what "fused" promises
    made_under: Any = None  # state and signature that hold for what is made now
    off: dict[str, str] = NOTHING  # sites of the running module that stay eager, and why
    off_inside: Mapping[int, dict[str, str]] = NOTHING  # the same of all modules inside it, by id
    stays: Mapping[int, str] = NOTHING  # modules that are not what their recipe is for, by id
    adapted: frozenset[int] | set[int] = frozenset()  # layers with an adapter around them, by id
    notes: Counter[tuple[str, str]] | None = None  # what became of each site, while somebody asks
    untold: set[str] | None = None  # sites that were compared on values that tell nothing


current = _Pass()
HERE = ("inside", "members", "made_under", "off", "off_inside", "stays", "adapted")


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


def as_here(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make` as it runs in the module that is running now, whenever it is called."""
    values = {name: getattr(current, name) for name in HERE}

    def again() -> Any:
        with set_now(**values):
            return make()

    return again


def eagerly() -> Any:
    """While this lasts, injected modules run their own forward."""
    return set_now(eager=True, comparing=False, off=NOTHING, notes=None, untold=None)


def equal(a: Any, b: Any) -> bool:
    """Whether two results have the same bits, over whatever a forward returns. A NaN is equal to a
    NaN: their payloads are not computed with."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return bool(torch.where(a.isnan(), b.isnan(), a == b).all())


def tells(*values: Any) -> bool:
    """Whether a comparison on these values says anything: zeros come out alike from any order of
    summation, and NaN from anything."""
    return all(_tells(v) for v in values if isinstance(v, Tensor) and v.is_floating_point())


def _tells(t: Tensor) -> bool:
    if t.numel() == 0:
        return True
    # a sum that is finite shows that every element is; this makes no tensor of their size
    facts = torch.stack([torch.count_nonzero(t).double(), t.detach().sum(dtype=torch.float64)])
    found, total = facts.tolist()
    finite = total == total and abs(total) != float("inf")
    return finite and found >= TELLING * t.numel()


def site(name: str, eager: Callable[[], Any], kernel: Callable[[], Any], *operands: Any) -> Any:
    """One fused place of a forward: the kernel, unless first sight found that it cannot run here or
    differs from eager. `operands` are what must not be zero for a comparison to prove anything."""
    if torch.compiler.is_compiling():
        return kernel()
    if current.off and name in current.off:
        return eager()
    if current.notes is None:
        return kernel()
    # before the kernel, which may write over one of them
    if current.untold is not None and not tells(*operands):
        current.untold.add(name)
    try:
        result = kernel()
    except ValueError as no:  # an op says so before it launches anything
        current.off[name] = str(no)
        return eager()
    current.notes[name, "fused"] += 1
    if not current.comparing:
        return result
    with eagerly(), torch.no_grad():  # norms and layers inside it are to be the model's own, too
        try:
            expected = eager()
            if equal(result, expected):
                return result
            why = DIFFERS
        except torch.OutOfMemoryError:
            expected, why = None, NO_MEMORY
    result = expected = None
    current.off[name] = why
    return eager()


def declined(name: str, why: str) -> None:
    """A place that could be fused and is not, because of what it was given."""
    if not torch.compiler.is_compiling() and current.notes is not None:
        current.notes[name, why] += 1
