"""Caches of keys and values among the inputs of a graph: the decode steps of a language model.

A forward writes to such a cache. So a graph works on the cache's own tensors, which are not copied
in and out as other inputs are. Three things follow.

- Only a cache of fixed size can be such an input (`cache_implementation="static"`): the tensors of
  the others move as they grow.
- `generate` makes a new cache each time. If the cache of the capture is gone, the new one takes
  over its memory: what it holds is copied there once.
- A replay whose result is not used has written to the cache. Its length is set back, and the plain
  forward then writes to the same places again. A sliding window that is full moves all it holds
  with each step: it is copied before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from ...library_internals import is_kv_cache, static_cache_layers
from .buffers import Refusal

TENSORS = ("keys", "values", "cumulative_length")
LENGTH = "cumulative_length_int"  # of a sliding window: also a number of Python
FILLS_UP = "a call that fills the sliding window of a cache and goes on"
DEPENDS_ON_LENGTH = "its forward depends on the length of its cache on the host"


def key_of(cache: Any) -> tuple[Any, ...] | None:
    """What calls with this cache must share to share a graph; None if it is no cache."""
    if not is_kv_cache(cache):
        return None
    layers = static_cache_layers(cache)
    if layers is None:
        kind = type(cache).__name__
        raise Refusal(
            f'a {kind}; a cache of fixed size (cache_implementation="static") is replayed'
        )
    if not all(layer.is_initialized for layer in layers):
        raise Refusal("an empty cache: a prompt runs without a graph")
    return type(cache), *map(_layer_key, layers)


def _layer_key(layer: Any) -> tuple[Any, ...]:
    # all layers of a cache have tensors of one layout, or the forward would not run
    keys, values = layer.keys, layer.values
    size = layer.max_cache_len, keys.shape, values.shape
    return type(layer), _is_full(layer), size, keys.dtype, keys.device


class CacheMemory:
    """The tensors of the caches that a graph writes to."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._owners = [ref(cache) for cache in caches]
        layers = _layers(caches)
        self._tensors = [[getattr(layer, name) for name in TENSORS] for layer in layers]
        # what a second run would not write over
        self._moving = [tensors[-1] for tensors in self._tensors]
        for layer, tensors in zip(layers, self._tensors, strict=True):
            self._moving += tensors[:-1] * _is_full(layer)
        self._saved = [tensor.clone() for tensor in self._moving]
        self._saved_numbers = _numbers(layers)
        self._steps: list[int] = []
        # whether a replay at another length than that of the capture was right
        self.confirmed = not caches

    def is_of(self, caches: Sequence[Any]) -> bool:
        return all(owner() is cache for owner, cache in zip(self._owners, caches, strict=True))

    def take_over(self, caches: Sequence[Any]) -> None:
        """Let caches use this memory. Refuses if others do that still use it."""
        layers = _layers(caches)
        if not self.is_of(caches):
            if any(owner() is not None for owner in self._owners):
                raise Refusal("another cache of the same sizes, while the first is still in use")
            self._owners = [ref(cache) for cache in caches]
        for layer, tensors in zip(layers, self._tensors, strict=True):
            for name, tensor in zip(TENSORS, tensors, strict=True):
                given = getattr(layer, name)
                if given is not tensor:
                    tensor.copy_(given)
                    setattr(layer, name, tensor)

    def save(self, caches: Sequence[Any]) -> None:
        """Note what `set_back` may have to undo after the next run."""
        if caches:
            torch._foreach_copy_(self._saved, self._moving)
            self._saved_numbers = _numbers(_layers(caches))

    def set_back(self, caches: Sequence[Any]) -> None:
        if caches:
            torch._foreach_copy_(self._moving, self._saved)
            self._set_numbers(caches, [0] * len(self._saved_numbers))

    def note_steps(self, caches: Sequence[Any]) -> None:
        """Note by how much a run moved the lengths that are numbers of Python."""
        windows = _sliding(_layers(caches))
        lengths = list(zip(windows, _numbers(windows), self._saved_numbers, strict=True))
        self._steps = [now - before for _, now, before in lengths]
        if any(before < w.max_cache_len < now for w, now, before in lengths):
            raise Refusal(FILLS_UP)

    def advance(self, caches: Sequence[Any]) -> None:
        """Move the numbers of Python as the forward of a replay would have done."""
        if caches:
            self._set_numbers(caches, self._steps)

    def _set_numbers(self, caches: Sequence[Any], steps: Sequence[int]) -> None:
        numbers = zip(_sliding(_layers(caches)), self._saved_numbers, steps, strict=True)
        for layer, saved, step in numbers:
            setattr(layer, LENGTH, saved + step)


def _layers(caches: Sequence[Any]) -> list[Any]:
    return [layer for cache in caches for layer in cache.layers]


def _sliding(layers: Sequence[Any]) -> list[Any]:
    return [layer for layer in layers if hasattr(layer, LENGTH)]


def _is_full(layer: Any) -> bool:
    """Whether this is a sliding window that is full: from then on it does other work."""
    return getattr(layer, LENGTH, -1) >= layer.max_cache_len


def _numbers(layers: Sequence[Any]) -> list[int]:
    return [getattr(layer, LENGTH) for layer in _sliding(layers)]
