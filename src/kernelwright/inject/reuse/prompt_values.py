"""What depends on a prompt alone: made when the prompt first comes, and kept until another does.

Every step of a denoising loop gives the model the same text. Its projection, and the keys and
values that cross-attention makes of it, come out the same each time.

A value is kept beside the very tensors it was made of, the text and the weights, and the state of
the module that made it. It is made anew if any of them is another one, or has been written to; see
`contents` for writes that PyTorch does not count. A CUDA graph does not contain these steps: they
are a graph of their own, which is replayed when the prompt changes (see graphs/prompt_graph.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ..graphs import prompt_graph
from ..graphs.capture import phase
from ..graphs.prompt_graph import root
from ..runtime import model_run, sites
from ..state.tensor_samples import Contents

T = TypeVar("T")


@dataclass(frozen=True)
class Made:
    """What a value was made of: tensors by object, memory and version, and what else decided it."""

    memory: tuple[ref[Any], ...]
    facts: Hashable

    @staticmethod
    def of(tensors: Sequence[Tensor], facts: Hashable) -> Made:
        return Made(tuple(map(memory_of, tensors)), (tuple(map(_identity, tensors)), facts))

    def holds(self, tensors: Sequence[Tensor], facts: Hashable) -> bool:
        """Whether these are the same tensors, and nobody has written to them."""
        return self.facts == (tuple(map(_identity, tensors)), facts) and all(
            r() is t.untyped_storage() for r, t in zip(self.memory, tensors, strict=True)
        )


@dataclass
class Prompts:
    """The values of one injection, one for each module."""

    contents: Contents
    _by_module: WeakKeyDictionary[nn.Module, tuple[Made, Any]] = field(
        default_factory=WeakKeyDictionary
    )

    def once(
        self, owner: nn.Module, source: Tensor, layers: Sequence[nn.Module], make: Callable[[], T]
    ) -> T:
        """What `make` makes of `source` with the weights of `layers`, on behalf of `owner`."""
        weights = [p for layer in layers for p in layer._parameters.values() if p is not None]
        if sites.current.notes is not None or not can_be_kept(source, weights):
            return make()
        running = prompt_graph.current()
        if running is not None:
            return running.once(owner, source, weights, sites.as_here(make))
        if source.is_cuda and not model_run.looks_back():
            return make()  # nobody would look in time whether it is written to
        origin = root(source)
        tensors = origin, *weights
        facts = layout(source), sites.current.made_under, self.contents.epoch
        entry = self._by_module.get(owner)
        if entry is not None and entry[0].holds(tensors, facts):
            return entry[1]
        self.contents.note(origin, whole=True)
        for weight in weights:
            self.contents.note(weight)
        made = Made.of(tensors, facts)
        value = make()
        self._by_module[owner] = made, value
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

    @staticmethod
    def keeps(source: Tensor) -> bool:
        """Whether all blocks of this forward may use one value. Where hooks or unknown code run in
        between, they may change what it is made of."""
        # in this order: a compiled block must not be made for one number of a model's state
        return can_be_kept(source, []) and bool(model_run.current.serial)

    def __call__(self, source: Tensor, facts: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes of `source` and `facts`, once in a forward of the model."""
        if not self.keeps(source):
            return make()
        known = facts, source._version, phase(), model_run.current.token
        last = self._last
        if last.source is None or last.source() is not source or last.facts != known:
            last.source, last.facts, last.value = ref(source), known, make()
        return last.value


def can_be_kept(source: Tensor, weights: Sequence[Any]) -> bool:
    """Whether version counters track writes to these tensors, and no gradient, autocast or trace
    needs the real call."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (source, *weights)):
        return False
    if torch.is_autocast_enabled(source.device.type):
        return False
    tensors = (source, *weights)
    return not any(t.is_inference() for t in tensors) and type(source) is Tensor


def memory_of(t: Tensor) -> ref[Any]:
    """The storage of a tensor, weakly. Weak references to a parameter itself would keep people from
    swapping it (torch.utils.swap_tensors)."""
    return ref(t.untyped_storage())


def _identity(t: Tensor) -> Hashable:
    return id(t), layout(t)


def layout(t: Tensor) -> Hashable:
    """What tells a view of a tensor from another one, and whether it was written to."""
    return t.dtype, t.shape, t.stride(), t.data_ptr(), t._version
