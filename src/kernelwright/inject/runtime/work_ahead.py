"""Work that a block does ahead for the next block.

A block ends by adding its branch to the residual, and the next one begins by normalising the sum.
One kernel can do both, if the first block knows which block follows. It returns the sum as always,
and offers the normalised rows beside it; the next block takes them only if its input is that very
tensor, unchanged. So anything between two blocks (a hook, a cache that skips blocks, an added
control signal) costs speed, never correctness.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from . import model_run
from .forwards import hooked

EMPTY: dict[int, nn.Module] = {}


class _Run(threading.local):
    """The model forward that is running in this thread."""

    following: dict[int, nn.Module | None] | None = None
    blocks: dict[int, nn.Module] = EMPTY
    key: Any = None  # the signature of the model's inputs
    offer: tuple[nn.Module, tuple[Tensor, ...], tuple[int, ...], Any] | None = None


_run = _Run()
_refused: WeakSet[nn.Module] = WeakSet()  # work ahead for these gave wrong results


@contextmanager
def chain(modules: Sequence[nn.Module], key: Any) -> Iterator[None]:
    """Set, while a model runs, the order in which it calls its blocks, and the signature of its
    inputs, which determines theirs."""
    before = _run.following, _run.blocks, _run.offer, _run.key
    _run.blocks = {id(m): m for m in modules}
    _run.following = {id(a): b for a, b in pairwise((*modules, None))}
    _run.offer, _run.key = None, key
    try:
        yield
    finally:
        _run.following, _run.blocks, _run.offer, _run.key = before


def shared_key(module: nn.Module) -> Any:
    """The signature of the running model's inputs if `module` is one of its blocks, else None."""
    blocks = _run.following
    return _run.key if blocks is not None and id(module) in blocks else None


def running() -> dict[int, nn.Module]:
    """The blocks of the running model by id; empty if they are not known."""
    return {} if torch.compiler.is_compiling() else _run.blocks


def following(module: nn.Module) -> nn.Module | None:
    """The block after this one, if work may be done ahead for it, else None."""
    if torch.compiler.is_compiling() or _run.following is None or torch.is_grad_enabled():
        return None
    after = _run.following.get(id(module))
    if after is None or hooked(module) or hooked(after) or (_refused and after in _refused):
        return None
    # a serial means that nothing in the model has hooks; a hook may have put one on a child since
    if not model_run.active.serial and any(m and hooked(m) for m in after._modules.values()):
        return None
    # a block that finds itself changed does again what was done ahead for it
    return after if model_run.may_run_twice(after) else None


def offer(module: nn.Module, given: tuple[Tensor, ...], value: Any) -> None:
    """Offer `value` to `module`, for a call with the very tensors `given`."""
    _run.offer = module, given, tuple(_version(t) for t in given), value


def take(module: nn.Module, *given: Tensor) -> Any:
    """The value offered to `module` for these very tensors, or None."""
    if torch.compiler.is_compiling() or _run.offer is None:
        return None
    owner, tensors, versions, value = _run.offer
    _run.offer = None
    if owner is not module or len(tensors) != len(given):
        return None
    for mine, theirs, version in zip(tensors, given, versions, strict=True):
        if mine is not theirs or _version(theirs) != version:
            return None
    return value


def is_offered(module: nn.Module) -> bool:
    """Whether a value is on offer for this module."""
    return _run.offer is not None and _run.offer[0] is module


def forget() -> None:
    _run.offer = None


def refuse(module: nn.Module) -> None:
    """Do no more work ahead for this module."""
    _refused.add(module)


def allow(module: nn.Module) -> None:
    _refused.discard(module)


def _version(t: Tensor) -> int:
    """A tensor's version counter. Inference tensors have none, but nothing writes between two
    blocks without hooks."""
    return 0 if t.is_inference() else t._version
