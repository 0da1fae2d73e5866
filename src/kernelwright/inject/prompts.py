"""What depends on a prompt alone: made when the prompt first comes, and kept until another does.

Every step of a denoising loop gives the model the same text. Its projection, and the keys and
values that cross-attention makes of it, come out the same each time.

A value is kept beside the very tensor it was made of. It is made anew if that tensor is another
one or has been written to, or if one of the weights has. A CUDA graph does not contain these steps:
they are a graph of their own, which is replayed when the prompt changes (see graphs/prelude.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from . import adapters, check
from .graphs import prelude
from .graphs.capture import phase
from .graphs.prelude import root

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    source: ref[Tensor]
    facts: Hashable
    value: Any


@dataclass
class Prompts:
    """The values of one injection, one for each module."""

    _by_module: WeakKeyDictionary[nn.Module, _Entry] = field(default_factory=WeakKeyDictionary)

    def __deepcopy__(self, memo: Any) -> Prompts:
        return Prompts()

    def once(
        self, owner: nn.Module, source: Tensor, layers: Sequence[nn.Module], make: Callable[[], T]
    ) -> T:
        """What `make` makes of `source` with the weights of `layers`, on behalf of `owner`."""
        weights = [p for layer in layers for p in layer._parameters.values() if p is not None]
        if check.current.comparing or not can_be_kept(source, weights):
            return make()
        for layer in layers:
            adapters.watch(layer)
        running = prelude.current()
        if running is not None:
            return running.once(owner, source, weights, _as_here(make))
        facts = (
            layout(source),
            [(w.data_ptr(), w._version) for w in weights],
            [adapters.moves(layer) for layer in layers],
            sorted(check.current.off),  # what was found to differ is not made the same way again
        )
        entry = self._by_module.get(owner)
        if entry is not None and entry.source() is root(source) and entry.facts == facts:
            return entry.value
        value = make()
        self._by_module[owner] = _Entry(ref(root(source)), facts, value)
        return value


class _Last(threading.local):
    source: ref[Tensor] | None = None
    facts: Any = None
    value: Any = None


class Shared:
    """The last value made of a tensor that a model hands to all of its blocks alike."""

    def __init__(self) -> None:
        self._last = _Last()

    def __deepcopy__(self, memo: Any) -> Shared:
        return Shared()

    def __call__(self, source: Tensor, facts: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes of `source` and `facts`, once as long as they stay the same."""
        if not can_be_kept(source, []):
            return make()
        known, last = (facts, source._version, phase()), self._last
        if last.source is None or last.source() is not source or last.facts != known:
            last.source, last.facts, last.value = ref(source), known, make()
        return last.value


def _as_here(make: Callable[[], T]) -> Callable[[], T]:
    """`make` as it runs in the module that is running now, whenever it is called."""
    inside, off = check.current.inside, check.current.off

    def again() -> T:
        with check.set_now(inside=inside, off=off):
            return make()

    return again


def can_be_kept(source: Tensor, weights: Sequence[Any]) -> bool:
    """Whether who writes to these tensors is counted, and nobody wants to see them being read."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (source, *weights)):
        return False
    if torch.is_autocast_enabled(source.device.type):
        return False
    tensors = (source, *weights)
    return not any(t.is_inference() for t in tensors) and type(source) is Tensor


def layout(t: Tensor) -> Hashable:
    """What tells a view of a tensor from another one, and whether it was written to."""
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t._version
