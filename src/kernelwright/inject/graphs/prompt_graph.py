"""The part of a forward that depends on some of its inputs alone, such as the text.

Before a forward is captured it runs once on the memory of the graph, and `Prelude` collects what is
made `once` of an input there. The graph then reads those values; making them is a graph of its own,
replayed only when such an input is another tensor than last time, or has been written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...backends.torch_internals import pytree, view_base


class _Running(threading.local):
    prelude: Prelude | None = None


_running = _Running()


def root(t: Tensor) -> Tensor:
    """The tensor that a view is a view of."""
    return view_base(t)


def current() -> Prelude | None:
    """The prelude of the forward that this thread captures, or is about to."""
    return _running.prelude


class Prelude:
    """The values that a forward makes of its `inputs`, in the order in which it makes them."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = {id(root(t)): i for i, t in enumerate(inputs)}
        self._made: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self._tensors: dict[int, Tensor] = {}  # what the values are parts of
        self._last: dict[int, tuple[ref[Tensor], int]] = {}
        self.weights: list[Tensor] = []
        self.sources: set[int] = set()  # numbers of the inputs that something was made of
        self.collecting = True

    @contextmanager
    def running(self) -> Iterator[None]:
        _running.prelude = self
        try:
            yield
        finally:
            _running.prelude = None

    def once(
        self, owner: nn.Module, source: Tensor, weights: Sequence[Tensor], make: Callable[[], Any]
    ) -> Any:
        origin = root(source)
        if id(origin) not in self._inputs and id(origin) not in self._tensors:
            return make()  # it depends on more than an input
        key = id(owner), id(origin), source.shape, source.stride(), source.storage_offset()
        if not self.collecting:
            return self._made[key][1] if key in self._made else make()
        value = make()
        self._made[key] = make, value
        parts = [root(t) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        self._tensors |= {id(t): t for t in parts}
        self.weights += weights
        if id(origin) in self._inputs:
            self.sources.add(self._inputs[id(origin)])
        return value

    def make_again(self) -> None:
        """Make every value anew, in its place."""
        for make, value in self._made.values():
            new = pytree.tree_leaves(make())
            for old, fresh in zip(pytree.tree_leaves(value), new, strict=True):
                old.copy_(fresh)

    def is_new(self, number: int, given: Tensor) -> bool:
        """Whether an input is another tensor than last time, or has been written to."""
        if given.is_inference():  # nobody counts who writes to it
            return True
        last = self._last.get(number)
        return last is None or last[0]() is not given or last[1] != given._version

    def note(self, number: int, given: Tensor) -> None:
        """Values are made of this input now."""
        self._last[number] = ref(given), 0 if given.is_inference() else given._version

    def forget(self) -> None:
        self._last.clear()
