"""What one block computes ahead for the next.

The last thing a block does is add its branch to the residual, and the first thing the next does is
normalise the sum. One kernel can do both, if the block that ends may ask what follows it. It hands
on the sum as always, and lays the normalised rows beside it; the next block takes them only if it
is given that very tensor, unchanged. Whatever stands between two blocks (a hook, a cache that skips
blocks, an added control signal) thus costs speed, never correctness.
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

NONE: dict[int, nn.Module] = {}


class _Run(threading.local):
    """The forward that is running in this thread."""

    following: dict[int, nn.Module | None] | None = None
    blocks: dict[int, nn.Module] = NONE
    key: Any = None  # the signature of what the whole model was given
    offer: tuple[nn.Module, tuple[Tensor, ...], tuple[int, ...], Any] | None = None


_run = _Run()
_refused: WeakSet[nn.Module] = WeakSet()  # what was laid ready for these came out wrong


@contextmanager
def chain(modules: Sequence[nn.Module], key: Any) -> Iterator[None]:
    """While a model runs: the order in which it calls its blocks, and the signature of its inputs,
    which decides what all of them are given."""
    before = _run.following, _run.blocks, _run.offer, _run.key
    _run.blocks = {id(m): m for m in modules}
    _run.following = {id(a): b for a, b in pairwise((*modules, None))}
    _run.offer, _run.key = None, key
    try:
        yield
    finally:
        _run.following, _run.blocks, _run.offer, _run.key = before


def shared_key(module: nn.Module) -> Any:
    """The signature of the running model's inputs, if `module` is one of its blocks."""
    blocks = _run.following
    return _run.key if blocks is not None and id(module) in blocks else None


def running() -> dict[int, nn.Module]:
    """The blocks of the running model by their id, if it is known."""
    return {} if torch.compiler.is_compiling() else _run.blocks


def following(module: nn.Module) -> nn.Module | None:
    """The module that runs next, if work may be done ahead for it."""
    if torch.compiler.is_compiling() or _run.following is None or torch.is_grad_enabled():
        return None
    after = _run.following.get(id(module))
    if after is None or hooked(module) or hooked(after) or (_refused and after in _refused):
        return None
    # where nothing has a hook, as the running model knows, its norms need not be asked
    if not model_run.current.serial and any(m and hooked(m) for m in after._modules.values()):
        return None
    return after


def offer(module: nn.Module, given: tuple[Tensor, ...], value: Any) -> None:
    """Lay `value` beside the tensors `given`, for `module` alone."""
    _run.offer = module, given, tuple(_version(t) for t in given), value


def take(module: nn.Module, *given: Tensor) -> Any:
    """What was laid ready for `module` beside these very tensors, or None."""
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
    """Whether something is laid ready for this module."""
    return _run.offer is not None and _run.offer[0] is module


def forget() -> None:
    _run.offer = None


def refuse(module: nn.Module) -> None:
    """Lay nothing ready for this module any more."""
    _refused.add(module)


def allow(module: nn.Module) -> None:
    _refused.discard(module)


def _version(t: Tensor) -> int:
    """How often a tensor was written; inference tensors do not count it, and between two blocks
    without hooks nothing writes."""
    return 0 if t.is_inference() else t._version
