"""Forwards that read values on the host, or copy tables from it: captured with what they read.

A capture may not wait for the GPU, and may not copy from ordinary host memory. Many forwards do
both outside of their blocks: the number of words in a prompt from its mask, a table of positions
that is kept on the CPU. The forward that runs before a capture records what is read and what is
copied; the capture repeats it. A table becomes a constant of the graph. A value that was read from
the GPU is compared inside the graph with the one that the graph was captured with: if they differ,
the result of the replay is not used.

What the host computes from its own tensors depends on the signature and the state of the model, and
on tensors that it did not make itself: the graph is valid until one of those is written to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends import torch_internals
from ...backends.torch_internals import own_dispatch_mode, pytree
from ..state.tensor_samples import compare_pairs
from .buffers import Refusal

aten: Any = torch.ops.aten
# give a number of Python
NUMBERS = frozenset((aten._local_scalar_dense.default, aten.equal.default))
COPIES = frozenset((aten._to_copy.default, aten.copy_.default, aten.copy.default))
INDEXED = frozenset((aten.index.Tensor, aten.index_put_.default, aten.index_put.default))
OTHER_VALUES = "a value that its forward reads on the host is another than at its capture"


class _Running(threading.local):
    reading = 0
    watched = True


_running = _Running()


def reading() -> bool:
    """Whether what this thread reads on the host is recorded or repeated: our own checks must not
    be part of that."""
    return _running.reading > 0


@contextmanager
def unwatched() -> Iterator[None]:
    """For what this thread reads in a way of its own."""
    before, _running.watched = _running.watched, False
    try:
        yield
    finally:
        _running.watched = before


class HostReads:
    """What a forward reads from the device, and copies to it, in order."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.collecting = True
        self.sources: list[Tensor] = []  # tensors of the host that the forward did not make
        self.kept: list[tuple[Any, ...]] = []  # what was read or copied
        self._flags: list[Tensor] = []
        self._next = 0
        self._made: dict[int, Tensor] = {}  # tensors of the host made by this run, by storage

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what this thread reads if `collecting`, else repeat it."""
        self._next, self._flags, self._made = 0, [], {}
        _running.reading += 1
        try:
            with own_dispatch_mode(), torch_internals.lifting_cpu_tensors(), _Mode(self):
                yield
        finally:
            _running.reading -= 1
            self._made = {}

    def finish(self) -> None:
        """To be captured after the forward: whether all values are those of the capture."""
        self._all = torch.stack(self._flags).all() if self._flags else None

    def check(self) -> None:
        """Refuse a replay that read other values. This waits for the GPU, as a plain call does."""
        if self._all is not None and not bool(self._all):
            raise Refusal(OTHER_VALUES)

    _all: Tensor | None = None

    # operations

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _running.watched:
            return func(*args, **kwargs)
        if func in NUMBERS and self._is_there(args):
            return self._read(func, args, kwargs)
        if func in COPIES:
            source = args[1] if func is not aten._to_copy.default else args[0]
            target = kwargs.get("device") if func is aten._to_copy.default else args[0].device
            target = source.device if target is None else torch.device(target)
            if source.device.type == self.device_type != target.type == "cpu":
                return self._read(func, args, kwargs)
            if source.device.type == "cpu" != target.type == self.device_type:
                return self._table(func, args, kwargs, source)
        if func in INDEXED:
            indices = [p for i in args[1] for p in self._positions(i)]
            args = (args[0], indices, *args[2:])
        elif torch.Tag.dynamic_output_shape in func.tags and self._is_there(args):
            return self._read(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.device_type != "cpu":
            self._note(args, kwargs, result)
        return result

    def _is_there(self, args: Any) -> bool:
        return any(t.device.type == self.device_type for t in _tensors(args))

    def _take(self, func: Any) -> tuple[Any, ...]:
        if self._next >= len(self.kept) or self.kept[self._next][0] is not func:
            raise Refusal("it reads other values during capture")
        self._next += 1
        return self.kept[self._next - 1]

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A value of the device, or a result whose shape depends on one."""
        read = [t for t in _tensors(args) if t.device.type == self.device_type]
        if self.collecting:
            result = func(*args, **kwargs)
            self.kept.append((func, result, [t.clone() for t in read]))
            return _fresh(result)
        _, result, then = self._take(func)
        self._flags += compare_pairs(zip(read, then, strict=True))
        if func is aten.copy_.default:
            args[0].copy_(result)
            return args[0]
        return _fresh(result)

    def _positions(self, index: Any) -> list[Any]:
        """A mask among the indices as the positions of what it chooses."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if index.device.type != self.device_type:
            return [index]
        positions = self._read(aten.nonzero.default, (index,), {})
        return list(positions.unbind(1))

    def _table(self, func: Any, args: Any, kwargs: Any, source: Tensor) -> Any:
        """A copy from the host to the device."""
        if self.collecting:
            result = func(*args, **kwargs)
            self.kept.append((func, result.clone(), source.clone()))
            self._note(args, kwargs, None)
            return result
        _, table, then = self._take(func)
        if source.shape != then.shape or not torch.equal(source, then):
            raise Refusal("it computes other tables during capture")
        if func is aten._to_copy.default or func is aten.copy.default:
            return table.clone()
        return args[0].copy_(table)

    def _note(self, args: Any, kwargs: Any, result: Any) -> None:
        """Keep apart the host's tensors that this run made and those that it found."""
        if not self.collecting:
            return
        for t in _tensors((args, kwargs)):
            if t.device.type == "cpu" and _storage(t) not in self._made:
                self._made[_storage(t)] = t
                self.sources.append(t)
        for t in _tensors(result):
            if t.device.type == "cpu":
                self._made.setdefault(_storage(t), t)


class _Mode(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.reads.run(func, args, kwargs or {})


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _fresh(result: Any) -> Any:
    """A copy of a recorded result, which the forward may write to."""
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, result)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
