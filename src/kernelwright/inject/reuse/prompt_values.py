"""Values that depend on the prompt alone: computed at its first step, cached until another comes.

Every step of a denoising loop passes the model the same text. Its projection, and the keys and
values that cross-attention computes from it, are the same each time.

A value is cached with the identity of the tensors it was computed from, the text and the weights,
and with the state of its module. It is computed again if one of them was replaced or written to, or
if the value was; see state/tensor_samples.py for writes that PyTorch does not count. A CUDA graph
of the model does not contain these steps: they are a graph of their own, replayed when the prompt
changes (see graphs/prompt_graph.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from ...backends.torch_internals import any_autocast, pytree
from ..graphs import prompt_graph
from ..graphs.capture import phase
from ..graphs.prompt_graph import root
from ..runtime import model_run, sites
from ..state.tensor_samples import TensorSamples

T = TypeVar("T")


@dataclass(frozen=True)
class MadeFrom:
    """What a value was computed from: tensors by object, storage and version, and other facts."""

    memory: list[ref[Any]]
    tensors: Any
    facts: Hashable

    @staticmethod
    def of(tensors: Sequence[Tensor], facts: Hashable) -> MadeFrom:
        return MadeFrom(list(map(storage_ref, tensors)), _identities(tensors), facts)

    def holds(self, tensors: Sequence[Tensor], facts: Hashable) -> bool:
        """Whether these are the same tensors, with the same contents as far as versions tell."""
        if self.facts != facts or self.tensors != _identities(tensors):
            return False
        memory = [alive() for alive in self.memory]
        return all(map(is_, memory, map(Tensor.untyped_storage, tensors)))


@dataclass(frozen=True)
class _Kept:
    """A cached value. A model may write to what it is given: then it is not that value any more."""

    made: MadeFrom
    value: Any
    tensors: list[Tensor]
    versions: list[int]

    @staticmethod
    def of(made: MadeFrom, value: Any) -> _Kept:
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        return _Kept(made, value, tensors, list(map(_version, tensors)))

    def holds(self, tensors: Sequence[Tensor], facts: Hashable) -> bool:
        return self.made.holds(tensors, facts) and self.versions == list(
            map(_version, self.tensors)
        )


@dataclass
class Prompts:
    """The cached values of one injection, one for each module."""

    samples: TensorSamples
    _by_module: WeakKeyDictionary[nn.Module, _Kept] = field(default_factory=WeakKeyDictionary)
    # bases of the cached tensors, by id
    _bases: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)

    def once(
        self,
        owner: nn.Module,
        source: Tensor,
        weights: Sequence[Tensor],
        make: Callable[[], T],
        kind: Hashable = None,
    ) -> T:
        """`make()`, cached for `owner`; it depends on `source` and `weights` alone. Values of
        another `kind` are not the same."""
        if sites.mode.notes is not None or not can_cache(source, weights):
            return make()
        running = prompt_graph.active()
        if running is not None:
            return running.once(owner, source, weights, sites.bind_mode(make), kind)
        if source.is_cuda and not model_run.checks_samples():
            return make()  # uncounted writes would go unnoticed
        origin = root(source)
        tensors = origin, *weights
        facts = layout_and_version(source), kind, sites.mode.cache_scope, self.samples.epoch
        entry = self._by_module.get(owner)
        if entry is not None and entry.holds(tensors, facts):
            return entry.value
        self.samples.note(origin, whole=True)
        for weight in weights:
            self.samples.note(weight)
        made = MadeFrom.of(tensors, facts)
        value = make()
        self._by_module[owner] = kept = _Kept.of(made, value)
        self._bases.update({id(base): base for base in map(root, kept.tensors)})
        return value

    def handed_out(self, result: Any) -> Any:
        """What a model returns, with copies of cached tensors: two calls must not return one."""
        if not self._bases or not any(map(self._is_kept, pytree.tree_leaves(result))):
            return result
        return pytree.tree_map(lambda t: t.clone() if self._is_kept(t) else t, result)

    def _is_kept(self, t: Any) -> bool:
        return isinstance(t, Tensor) and self._bases.get(id(base := root(t))) is base

    def have_made(self, t: Tensor) -> bool:
        """Whether a tensor is a cached value, or a view of one."""
        running = prompt_graph.active()
        return self._is_kept(t) if running is None else running.has_made(root(t))


@dataclass(frozen=True)
class _Shared:
    """A value that blocks share, and what it was computed from."""

    sources: list[ref[Tensor]]
    facts: Any
    value: Any

    def is_of(self, sources: Sequence[Tensor], facts: Any) -> bool:
        return self.facts == facts and all(map(is_, [r() for r in self.sources], sources))


class _Newest(threading.local):
    def __init__(self) -> None:
        # of two tensors: a model with sliding windows passes its layers two masks in turn
        self.values: deque[_Shared] = deque(maxlen=2)


class PerForwardCache:
    """A value that the blocks of a forward share, computed from a tensor each of them is given. It
    is let go when the forward ends: a mask of all pairs of tokens takes as much as a layer."""

    def __init__(self) -> None:
        self._newest = _Newest()

    def __deepcopy__(self, memo: Any) -> PerForwardCache:
        return PerForwardCache()

    @staticmethod
    def is_allowed(source: Tensor, others: Sequence[Tensor] = ()) -> bool:
        """Whether the blocks of this forward may share a value. Hooks or unknown code between them
        may change what it is computed from."""
        # in this order: Dynamo must not guard on the serial number, which changes
        if not can_cache(source, others) or not model_run.active.serial:
            return False
        return all(type(t) is Tensor for t in others) if others else True

    def __call__(
        self, source: Tensor, facts: Hashable, make: Callable[[], T], others: Sequence[Tensor] = ()
    ) -> T:
        """`make()`, which depends on `source`, `facts` and `others` alone: once per forward of the
        model."""
        if not self.is_allowed(source, others):
            return make()
        return self._shared(source, facts, make, others)

    def or_none(self, source: Tensor, make: Callable[[], T]) -> T | None:
        """The same for what depends on `source` alone; None if blocks may not share a value."""
        return self._shared(source, None, make) if self.is_allowed(source) else None

    def _shared(
        self, source: Tensor, facts: Hashable, make: Callable[[], T], others: Sequence[Tensor] = ()
    ) -> T:
        sources = (source, *others)
        known = facts, [t._version for t in sources], phase(), model_run.active.token
        values = self._newest.values
        for shared in values:
            if shared.is_of(sources, known):
                return shared.value
        value = make()
        values.append(_Shared(list(map(ref, sources)), known, value))
        if model_run.active.at_end is not None:
            model_run.active.at_end.append(values.clear)
        return value


def can_cache(source: Tensor, weights: Sequence[Any]) -> bool:
    """Whether version counters track writes to these tensors, which have memory of their own, and
    no gradient, autocast or trace needs the real call."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (source, *weights)):
        return False
    if any_autocast() and torch.is_autocast_enabled(source.device.type):
        return False
    if type(source) is not Tensor or source.is_inference():
        return False
    # a quantised weight of torchao is a wrapper around other tensors, without memory of its own
    if any(map(_is_wrapper, map(type, weights))):
        return False
    return not (weights and any(map(Tensor.is_inference, weights)))


@lru_cache  # asked for every weight of every block
def _is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def storage_ref(t: Tensor) -> ref[Any]:
    """A weak reference to the storage: torch.utils.swap_tensors refuses a parameter that has weak
    references itself."""
    return ref(t.untyped_storage())


_attributes = attrgetter("_version", "dtype", "shape")
_version = attrgetter("_version")


def _identities(tensors: Sequence[Tensor]) -> Any:
    """Which tensors these are, where they lie, and how often they were written to. This is read for
    every block, so builtins do the loops."""
    return (
        list(map(id, tensors)),
        list(map(Tensor.data_ptr, tensors)),
        list(map(Tensor.stride, tensors)),
        list(map(_attributes, tensors)),
    )


def layout_and_version(t: Tensor) -> Hashable:
    """Which view of its storage a tensor is, and how often it was written to."""
    return t.dtype, t.shape, t.stride(), t.data_ptr(), t._version
