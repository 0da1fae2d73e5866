"""Fusion sites, and the mode in which injected modules run in this thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree
from ..state.class_code import SIMPLE
from .informative import Uninformative

Forward = Callable[..., Any]
EMPTY: dict[Any, Any] = {}
DIFFERS = "differs from eager's"
NO_MEMORY = "not enough memory for a second run beside it"


class BackendUnavailable(RuntimeError):
    """The backend that the user asked for cannot run on the model's device."""


class Declined(Exception):
    """A block does not run as programs, in a run that is for those alone."""


class _Mode(threading.local):
    """How injected modules behave in this thread."""

    eager = False  # as if nothing were injected
    inside = False  # inside a fused forward, which was checked with all of its `members`
    members: frozenset[int] = frozenset()  # ids of the injected modules that it covers
    comparing = False  # compare each site with eager
    aside = False  # a second run, on copies of caches, which the block's own forward must not get
    fp8 = True  # off while a module is checked against the error bound of "fused"
    cache_scope: Any = None  # state and signature under which values may be cached
    owner = 0  # the id of the module whose state and signature these are
    off: dict[str, str] = EMPTY  # sites of the running module that stay eager, and why
    off_inside: Mapping[int, dict[str, str]] = EMPTY  # the same for modules inside it, by id
    excluded: Mapping[int, str] = EMPTY  # ids of modules that do not fit their recipe, and why
    adapted: frozenset[int] | set[int] = frozenset()  # layers with an adapter around them, by id
    notes: Counter[tuple[str, str]] | None = None  # outcomes of sites, during first sight only
    uninformative: Uninformative | None = None  # sites compared on values that prove nothing


mode = _Mode()
# fields that belong to the running module
MODULE_FIELDS = (
    *("inside", "members", "cache_scope", "owner", "off", "off_inside", "excluded", "adapted"),
)
module_fields: Callable[[_Mode], tuple[Any, ...]] = attrgetter(*MODULE_FIELDS)


@contextmanager
def set_mode(**values: Any) -> Iterator[None]:
    """Set fields of this thread's mode for the duration of a `with` block."""
    before = {name: getattr(mode, name) for name in values}
    for name, value in values.items():
        setattr(mode, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(mode, name, value)


def bind_mode(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, to be called later in the mode of the module that is running now."""
    values = dict(zip(MODULE_FIELDS, module_fields(mode), strict=True))

    def again() -> Any:
        with set_mode(**values):
            return make()

    return again


def eagerly() -> Any:
    """Run injected modules with their own forwards for the duration of a `with` block."""
    return set_mode(eager=True, comparing=False, off=EMPTY, notes=None, uninformative=None)


def equal(a: Any, b: Any) -> bool:
    """Whether two results of a forward have the same bits in all their tensors. NaNs are equal
    whatever their payload."""
    ours, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and (not isinstance(a, SIMPLE) or a == b or a != a)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return bool(torch.where(a.isnan(), b.isnan(), a == b).all())


def same_strides(a: Any, b: Any) -> bool:
    """Whether the tensors of two equal results have the same strides. PyTorch may sum a tensor of
    other strides in another order."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(_strides(x) == _strides(y) for x, y in pairs if isinstance(x, Tensor))


def _strides(t: Tensor) -> list[int]:
    """Those that matter: of dimensions with more than one element."""
    return [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


def site(name: str, eager: Callable[[], Any], kernel: Callable[[], Any], *operands: Any) -> Any:
    """One fusion site of a forward: runs the kernel, unless first sight found that it cannot run
    here or differs from eager. A comparison proves nothing if one of `operands` is zeros or NaN."""
    if torch.compiler.is_compiling():
        return kernel()
    if mode.off and name in mode.off:
        return eager()
    if mode.notes is None:
        return kernel()
    # before the kernel, which may overwrite one of them
    if mode.uninformative is not None:
        mode.uninformative.look_at(name, operands)
    try:
        result = kernel()
    except ValueError as no:  # an op raises it before it launches anything
        mode.off[name] = str(no)
        return eager()
    mode.notes[name, "fused"] += 1
    if not mode.comparing:
        return result
    with eagerly(), torch.no_grad():  # modules called in the eager steps run their own forward too
        try:
            expected = eager()
            if equal(result, expected):
                return result
            why = DIFFERS
        except torch.OutOfMemoryError:
            expected, why = None, NO_MEMORY
    result = expected = None
    mode.off[name] = why
    return eager()


def declined(name: str, why: str) -> None:
    """Note that a site is not fused because of its inputs."""
    if not torch.compiler.is_compiling() and mode.notes is not None:
        mode.notes[name, why] += 1
