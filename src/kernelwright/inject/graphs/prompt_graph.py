"""The part of a forward that depends on a single input, such as the prompt, as a graph of its own.

Before its capture a forward runs once on the memory of the graph, and `PromptGraph` collects the
values that it computes `once` from an input. The main graph reads those values. A second graph
computes them; it is replayed only when that input is another tensor, or was written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...backends.torch_internals import pytree, view_base


class _Running(threading.local):
    prompt_graph: PromptGraph | None = None


_running = _Running()


def root(t: Tensor) -> Tensor:
    """The base of a view; the tensor itself if it is no view."""
    return view_base(t)


def active() -> PromptGraph | None:
    """The prompt graph of the forward that this thread captures, or is about to capture."""
    return _running.prompt_graph


@dataclass(frozen=True)
class _Made:
    """A value, and what makes it anew."""

    make: Callable[[], Any]
    value: Any
    origin: int  # the id of the base of what it was made of
    weights: Sequence[Tensor]
    parts: list[Tensor]  # bases of its tensors
    versions: list[int]

    def is_written(self) -> bool:
        return self.versions != [t._version for t in self.parts]


class PromptGraph:
    """The values that a forward computes from one of its `inputs`, in order."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = {id(root(t)): i for i, t in enumerate(inputs)}
        self._made: dict[Any, _Made] = {}
        self._tensors: dict[int, Tensor] = {}  # bases of the values' tensors, by id
        self._last: dict[int, tuple[ref[Tensor], int]] = {}
        self.weights: list[Tensor] = []
        self.sources: set[int] = set()  # indices of the inputs that values were computed from
        self.collecting = True

    @contextmanager
    def running(self) -> Iterator[None]:
        _running.prompt_graph = self
        try:
            yield
        finally:
            _running.prompt_graph = None

    def once(
        self,
        owner: nn.Module,
        source: Tensor,
        weights: Sequence[Tensor],
        make: Callable[[], Any],
        kind: Hashable = None,
    ) -> Any:
        """The value of `make()`, which reads `source` and `weights` only: collected, or reused."""
        origin = root(source)
        if id(origin) not in self._inputs and id(origin) not in self._tensors:
            return make()  # the source is neither an input nor computed from one alone
        key = id(owner), kind, id(origin), source.shape, source.stride(), source.storage_offset()
        if not self.collecting:
            return self._made[key].value if key in self._made else make()
        value = make()
        parts = [root(t) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        versions = [t._version for t in parts]
        self._made[key] = _Made(make, value, id(origin), weights, parts, versions)
        self._tensors |= {id(t): t for t in parts}
        return value

    def has_made(self, base: Tensor) -> bool:
        return id(base) in self._tensors

    def finish(self) -> None:
        """End collecting. What the forward has written to is made in the main graph, so that each
        replay writes to a new value, and so is what was made of it."""
        self.collecting = False
        for key, made in list(self._made.items()):
            known = made.origin in self._inputs or made.origin in self._tensors
            if not known or made.is_written():
                del self._made[key]
                for t in made.parts:
                    self._tensors.pop(id(t), None)
        kept = self._made.values()
        self.sources = {self._inputs[m.origin] for m in kept if m.origin in self._inputs}
        self.weights = [w for m in kept for w in m.weights]

    def recompute(self) -> None:
        """Compute every value anew, in place."""
        for made in self._made.values():
            new = pytree.tree_leaves(made.make())
            for old, fresh in zip(pytree.tree_leaves(made.value), new, strict=True):
                old.copy_(fresh)

    def is_new(self, index: int, given: Tensor) -> bool:
        """Whether an input is another tensor than last time, or was written to."""
        if given.is_inference():  # it has no version counter
            return True
        last = self._last.get(index)
        return last is None or last[0]() is not given or last[1] != given._version

    def note(self, index: int, given: Tensor) -> None:
        """Record that the values are now those of this input."""
        self._last[index] = ref(given), 0 if given.is_inference() else given._version

    def forget(self) -> None:
        self._last.clear()
