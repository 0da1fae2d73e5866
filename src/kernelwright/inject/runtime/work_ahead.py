"""Work that a block does ahead for the next block.

A block ends by adding its branch to the residual, and the next one begins by normalising the sum.
One kernel can do both, if the first block knows which block follows. It returns the sum as always,
and offers the normalised rows beside it; the next block takes them only if its input is that very
tensor, unchanged. So anything between two blocks (a hook, a cache that skips blocks, an added
control signal) costs speed, never correctness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from . import model_run
from .forwards import hooked

EMPTY: dict[int, nn.Module] = {}


@dataclass(eq=False)
class _Offer:
    module: nn.Module
    given: Sequence[Tensor]
    versions: list[int]
    value: Any
    missed: Callable[[], None] | None  # called if nobody takes it


class _Run(threading.local):
    """The model forward that is running in this thread."""

    following: dict[int, nn.Module | None] | None = None
    blocks: dict[int, nn.Module] = EMPTY
    key: Any = None  # the signature of the model's inputs
    offer: _Offer | None = None
    ran: Any = None  # what the last block has noted about itself


_run = _Run()
_refused: WeakSet[nn.Module] = WeakSet()  # work ahead for these gave wrong results


@contextmanager
def chain(modules: Sequence[nn.Module | None], key: Any) -> Iterator[None]:
    """Set, while a model runs, the order in which it calls its blocks, and the signature of its
    inputs, which determines theirs. None stands for a module for which no work is done ahead."""
    before = _run.following, _run.blocks, _run.offer, _run.key, _run.ran
    _run.blocks = {id(m): m for m in modules if m is not None}
    _run.following = {id(a): b for a, b in pairwise((*modules, None)) if a is not None}
    _run.offer, _run.key, _run.ran = None, key, None
    try:
        yield
        decline()
    finally:
        _run.following, _run.blocks, _run.offer, _run.key, _run.ran = before


def shared_key(module: nn.Module) -> Any:
    """The signature of the running model's inputs if `module` is one of its blocks, else None."""
    blocks = _run.following
    return _run.key if blocks is not None and id(module) in blocks else None


def running() -> dict[int, nn.Module]:
    """The blocks of the running model by id; empty if they are not known."""
    return {} if torch.compiler.is_compiling() else _run.blocks


def following(module: nn.Module) -> nn.Module | None:
    """The block after this one, if work may be done ahead for it, else None."""
    if torch.compiler.is_compiling() or _run.following is None:
        return None
    after = _run.following.get(id(module))
    return after if after is not None and is_allowed(module, after) else None


@contextmanager
def alone() -> Iterator[None]:
    """Do no work ahead for the block after the one that runs now: nobody would take it."""
    before, _run.following = _run.following, None
    try:
        yield
    finally:
        _run.following = before


def is_allowed(module: nn.Module, after: nn.Module) -> bool:
    """Whether one block of the running model may work ahead for another."""
    if _run.following is None or torch.is_grad_enabled():
        return False
    if hooked(module) or hooked(after) or (_refused and after in _refused):
        return False
    # a serial means that nothing in the model has hooks; a hook may have put one on a child since
    if not model_run.active.serial and any(m and hooked(m) for m in after._modules.values()):
        return False
    # a block that finds itself changed does again what was done ahead for it
    return model_run.may_run_twice(after)


def offer(
    module: nn.Module,
    given: Sequence[Tensor],
    value: Any,
    missed: Callable[[], None] | None = None,
) -> None:
    """Offer `value` to `module`, for a call with the very tensors `given`. If nobody takes it until
    the next offer or the end of the forward, `missed` is called."""
    decline()
    _run.offer = _Offer(module, given, _versions(given), value, missed)


def take(module: nn.Module, *given: Tensor) -> Any:
    """The value offered to `module` for these very tensors, or None."""
    if torch.compiler.is_compiling() or _run.offer is None:
        return None
    found = _run.offer
    fits = found.module is module and len(found.given) == len(given)
    if fits and all(map(is_, found.given, given)) and _versions(given) == found.versions:
        _run.offer = None
        return found.value
    decline()
    return None


def offered(module: nn.Module) -> Any:
    """The value on offer for this module, which may not be for its inputs; None if there is none.
    What is on offer for another is then no longer."""
    if _run.offer is None:
        return None
    if _run.offer.module is module:
        return _run.offer.value
    decline()
    return None


def decline() -> None:
    """Nobody will take what is on offer."""
    found, _run.offer = _run.offer, None
    if found is not None and found.missed is not None:
        found.missed()


def note_run(value: Any) -> None:
    """Note what the next block may want to know about this one, until the forward ends."""
    if _run.following is not None:
        _run.ran = value


def returns_instead(results: Any, others: Any) -> None:
    """The block that has just run returns other tensors of the same values than it has noted."""
    if _run.ran is not None:
        _run.ran.returns_instead(results, others)


def last_run() -> Any:
    """What the last block has noted, once."""
    found, _run.ran = _run.ran, None
    return found


def is_offered(module: nn.Module) -> bool:
    """Whether a value is on offer for this module."""
    return _run.offer is not None and _run.offer.module is module


def forget() -> None:
    """Drop what is on offer, which may be wanted again."""
    _run.offer = None


def refuse(module: nn.Module) -> None:
    """Do no more work ahead for this module."""
    _refused.add(module)


def allow(module: nn.Module) -> None:
    _refused.discard(module)


_version = attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Version counters. Inference tensors have none: recorded blocks return others, and models that
    have a recipe do not write to what a block returns."""
    if not torch.is_inference_mode_enabled():
        try:
            return list(map(_version, tensors))
        except RuntimeError:  # an inference tensor that was made before
            pass
    return [0 if t.is_inference() else t._version for t in tensors]
