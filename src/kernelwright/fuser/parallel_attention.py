"""Attention that exchanges tensors with other processes, as one op of a recorded graph.

diffusers' context parallelism runs attention in an autograd.Function with collectives inside, of
which no graph can be recorded. All of its backends call one function for it. While a forward is
recorded that function is wrapped, for the recording thread only: a call is one op of the graph, and
running the op calls diffusers' function with the settings it was recorded with.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ..library_internals import PARALLEL_FUNCTION, attention_dispatch
from ..ops import library


class ParallelCall:
    """A call of diffusers' function, without its tensors."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.function(query, key, value, mask, *self.args, **self.kwargs)


_one_at_a_time = threading.RLock()


class _Recording(threading.local):
    """The calls of the forward that is recorded in this thread."""

    calls: dict[int, ParallelCall] | None = None


_recording = _Recording()
_numbers = count()
# by the number that stands in a graph; recordings hold their own
_known: WeakValueDictionary[int, ParallelCall] = WeakValueDictionary()


def attend_in_parallel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, number: int
) -> Tensor:
    return _known[number](query, key, value, mask)


PARALLEL_ATTENTION = library.define(
    "recorded_parallel_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, int number) -> Tensor",
    attend_in_parallel,
    lambda query, key, value, *_: query.new_empty(*query.shape[:-1], value.shape[-1]),
)


@contextmanager
def recorded_calls() -> Iterator[dict[int, ParallelCall]]:
    """Collect the calls of this thread, each as one op."""
    diffusers, before = attention_dispatch(), _recording.calls
    with _one_at_a_time:  # the function is replaced for all threads
        own = getattr(diffusers, PARALLEL_FUNCTION, None)
        if own is not None:
            setattr(diffusers, PARALLEL_FUNCTION, _as_op(own))
        calls = _recording.calls = {}
        try:
            yield calls
        finally:
            _recording.calls = before
            if own is not None:
                setattr(diffusers, PARALLEL_FUNCTION, own)


def _as_op(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        calls = _recording.calls
        if calls is None:  # another thread
            return function(query, key, value, mask, *args, **kwargs)
        number = next(_numbers)
        calls[number] = _known[number] = ParallelCall(function, args, kwargs)
        return PARALLEL_ATTENTION(query, key, value, mask, number)

    return call
