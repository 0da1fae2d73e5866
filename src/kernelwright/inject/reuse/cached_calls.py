"""What recorded blocks call of caches, and of attention over them, in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from ...fuser.cached_attention import (
    LAYER_INDEX,
    Attend,
    AttentionCall,
    CacheUpdate,
    Run,
    running_calls,
)
from ...fuser.recording import Recording
from ..runtime.cache_copies import CacheCopies, can_copy

# the calls of a recording, and the modules of one block that make them
OwnCalls = Sequence[tuple["CacheUpdate | AttentionCall", ref[nn.Module]]]


def own_calls(module: nn.Module, recording: Recording) -> OwnCalls | None:
    """The calls of a recording, with the modules of a block that make them. None if modules have
    different indices here that have one index in the block that was recorded."""
    found: list[Any] = []
    for call in recording.cached:
        owners = [module.get_submodule(name) for name in call.owners]
        if len({vars(m).get(LAYER_INDEX) for m in owners}) > 1:
            return None
        found.append((call, ref(owners[0])))
    return found


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of a block that is given a cache."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: OwnCalls
    attend: Attend

    def why_not(self) -> str | None:
        """Why the calls are not those that were recorded, or None."""
        for call, owner in self.calls:
            module: Any = owner()
            if isinstance(call, AttentionCall) and call.function(module) is not call.recorded:
                return "another attention function than when it was recorded"
        return None

    def runs(self, given: tuple[Any, Any]) -> list[Run]:
        """What to run for each number in the graph, with the caches of these inputs."""
        found: list[Run] = []
        for call, owner in self.calls:
            module = owner()
            assert module is not None
            if isinstance(call, CacheUpdate):
                cache: Any = given
                for step in call.path:
                    cache = step(cache)
                found.append(partial(call, cache, module))
            else:
                found.append(partial(call, module, self.attend))
        return found


class _Running(threading.local):
    call: BlockCall | None = None


_running = _Running()


@contextmanager
def running_call(call: BlockCall) -> Iterator[None]:
    """Make this the call of a block that runs in this thread."""
    before, _running.call = _running.call, call
    try:
        with running_calls(call.runs((call.args, call.kwargs))):
            yield
    finally:
        _running.call = before


def caches_aside() -> CachesAside | None:
    """None if the caches cannot be copied now, or if memory is too short for it."""
    call = _running.call
    if call is not None and not can_copy(call.module, call.args, call.kwargs):
        return None
    try:
        return CachesAside()
    except torch.OutOfMemoryError:
        return None


class CachesAside:
    """Copies of the caches of the block that runs in this thread, as they are before it does: for a
    second run, inside a `with` block."""

    def __init__(self) -> None:
        self._call = call = _running.call
        if call is not None:
            self._copies = CacheCopies(call.module, call.args, call.kwargs)

    def __enter__(self) -> None:
        if self._call is not None:
            self._calls = running_calls(self._call.runs(self._copies.given()))
            self._calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._call is not None:
            self._calls.__exit__(*error)

    def written(self) -> tuple[list[Any], list[Any]]:
        """What the second run has written, and what the first has."""
        return ([], []) if self._call is None else self._copies.written()
