"""Attention over a key-value cache of transformers, as ops of a recorded graph.

A decoder layer hands the keys and values of new tokens to its cache, gets those of all tokens back,
and calls the attention function that its config names. Both calls depend on how many tokens the
cache holds, which differs at every call; nothing else in a layer does. So each is one op of the
graph: running it calls `update` of the cache that is given, or the layer's attention function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..ops import library
from .watched_forward import CannotRecord

# runs one call with these tensors
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Path = tuple[Callable[[Any], Any], ...]
LAYER_INDEX = "layer_idx"  # what modules of transformers call their place in a cache


@dataclass(frozen=True)
class CacheUpdate:
    """`cache.update(key, value, layer_idx, ...)`."""

    path: Path  # how to find the cache in (args, kwargs)
    owners: tuple[str, ...]  # the names of the modules in the block that have this index
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, cache: Any, owner: nn.Module, given: Sequence[Tensor]) -> Sequence[Tensor]:
        key, value = given
        return cache.update(key, value, getattr(owner, LAYER_INDEX), *self.args, **self.kwargs)


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function that a module's config names: `given` has query, key, value,
    the mask if there is one, and the keyword arguments of `tensors`."""

    owners: tuple[str, ...]  # the name of the module in the block
    function: Callable[[nn.Module], Callable[..., Any]]
    recorded: Callable[..., Any]  # what that was for the block that was recorded
    masked: bool
    kwargs: dict[str, Any]
    tensors: tuple[str, ...]

    def __call__(self, owner: nn.Module, attend: Attend, given: Sequence[Tensor]) -> list[Tensor]:
        query, key, value, *others = given
        mask = others.pop(0) if self.masked else None
        kwargs = {**self.kwargs, **dict(zip(self.tensors, others, strict=True))}
        found = attend(self.recorded, owner, query, key, value, mask, kwargs)
        return [t for t in found if t is not None]


# calls an attention function: (function, module, query, key, value, mask, keyword arguments)
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def plainly(
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    return function(module, query, key, value, mask, **kwargs)


class _Running(threading.local):
    """What the calls of the block that is recorded or run in this thread do, by number."""

    calls: Sequence[Run] = ()


_running = _Running()


@contextmanager
def running_calls(calls: Sequence[Run]) -> Iterator[None]:
    """Make these the calls that a graph means, by their number."""
    before, _running.calls = _running.calls, calls
    try:
        yield
    finally:
        _running.calls = before


def run_call(given: Sequence[Tensor], number: int) -> Sequence[Tensor]:
    return _running.calls[number](given)


def _called(given: Sequence[Tensor], number: int) -> list[Tensor]:
    # an op must not return its own input
    return [t.clone() if any(t is g for g in given) else t for t in run_call(given, number)]


def _unknown(given: Sequence[Tensor], number: int) -> Any:
    raise CannotRecord("what a cache returns is not known before it is called")


SCHEMA = "(Tensor[] given, int number) -> Tensor[]"
CACHE_UPDATE = library.define("recorded_cache_update", SCHEMA, _called, _unknown)
CACHED_ATTENTION = library.define("recorded_attention_over_cache", SCHEMA, _called, _unknown)
CALLS = (CACHE_UPDATE, CACHED_ATTENTION)
