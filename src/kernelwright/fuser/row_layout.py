"""How the elements along a row lie in the lanes of a thread, and where that is in memory.

A thread holds vectors of V neighbours. The variables along the row have a value in each lane that
is known when the kernel is compiled, beside one that the vector decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..backends import Unsupported
from .index import Affine, position
from .lowering import Shape

# the widest access of a thread in bytes
ACCESS = 16


@dataclass
class Access:
    """A pointer of the kernel: a tensor at a certain place of each row."""

    number: int
    name: str
    dtype: torch.dtype
    constant: int
    strides: list[int]
    dynamic: tuple[tuple[str, int], ...]
    reach: int = 0  # the last element that a lane takes, counted from the first of the vector


def widest_vector(shape: Shape, extents: Mapping[str, int], itemsize: int) -> int:
    """How many neighbours a thread may hold as one vector."""
    width = prod(extents[n] for n in shape.along)
    vector = ACCESS // max(itemsize, 2)
    while vector > 1 and (width % vector or not _fits(shape, extents, vector)):
        vector //= 2
    return vector


def _fits(shape: Shape, extents: Mapping[str, int], vector: int) -> bool:
    """Whether the value of each variable in each lane is known."""
    stride = 1
    for name in reversed(shape.along):
        reach = stride * extents[name]
        if not (stride % vector == 0 or vector % reach == 0 or vector % stride == 0):
            return False
        if stride < vector < reach and reach % vector:
            return False
        stride = reach
    return True


class RowLayout:
    """The variables along a row: `lane` has their values in each lane, `rest` the code for what a
    vector adds to that ("" if nothing). The vectors of a thread are `apart` elements apart: `moves`
    has by how much a variable grows from one to the next, None if that differs."""

    def __init__(
        self, shape: Shape, extents: Mapping[str, int], vector: int, apart: int = 0
    ) -> None:
        self.shape, self.extents, self.V, self.apart = shape, extents, vector, apart
        self.width = prod(extents[n] for n in shape.along)
        if self.width % vector or not _fits(shape, extents, vector):
            raise Unsupported(f"vectors of {vector} along {self.width} elements")
        self.accesses: dict[Any, Access] = {}
        self.lane: dict[str, list[int]] = {}
        self.rest: dict[str, str] = {}
        self.moves: dict[str, int | None] = {}
        stride = 1
        for name in reversed(shape.along):
            extent = extents[name]
            reach = stride * extent
            if apart % reach == 0:
                self.moves[name] = 0
            else:
                steady = reach == self.width and apart % stride == 0
                self.moves[name] = apart // stride if steady else None
            base = "base" if self.moves[name] is None else "first"
            whole = f"{base} / {stride}" if stride > 1 else base
            whole = whole if reach == self.width else f"{whole} % {extent}"
            lanes = range(vector)
            if stride >= vector:
                self.lane[name], self.rest[name] = [0] * vector, whole
            elif reach <= vector:
                self.lane[name] = [i // stride % extent for i in lanes]
                self.rest[name] = ""
            else:
                self.lane[name] = [i // stride for i in lanes]
                self.rest[name] = whole
            stride = reach

    def address(
        self, name: str, steps: tuple[int, ...], index: tuple[Affine, ...], dtype: torch.dtype
    ) -> tuple[Access, list[int]]:
        """The pointer of an access, and what to add to it in each lane."""
        total = position(index, steps)
        terms = dict(total.terms)
        strides = [terms.get(n, 0) for n in self.shape.rows]
        along = {n: terms.get(n, 0) for n in self.shape.along}
        dynamic = tuple((n, c) for n, c in along.items() if c and self.rest[n])
        lanes = [
            total.constant + sum(c * self.lane[n][i] for n, c in along.items())
            for i in range(self.V)
        ]
        low = min(lanes) // self.V * self.V
        key = name, tuple(strides), dynamic, low
        if key not in self.accesses:
            number = len(self.accesses)
            self.accesses[key] = Access(number, name, dtype, low, strides, dynamic)
        access = self.accesses[key]
        access.reach = max(access.reach, max(lanes) - low)
        return access, [lane - low for lane in lanes]

    def vector_size(self, access: Access) -> int | None:
        """How many neighbours are loaded for the lanes of an access: V, or twice as many where they
        take every second one, as of a matrix for each pair; None if they lie further apart, or if
        the last 16 bytes might lie beyond the end of the tensor."""
        if access.reach < self.V:
            return self.V
        last = 2 * self.V - min(2 * self.V, ACCESS // access.dtype.itemsize)
        return 2 * self.V if last <= access.reach < 2 * self.V else None

    def offset(self, access: Access) -> str:
        """What to add to a pointer for the vector at `base`; `first` is where the first vector of
        the thread begins."""
        stride, dense = 1, True
        for name in reversed(self.shape.along):
            coefficient = dict(access.dynamic).get(name, 0)
            dense &= not self.rest[name] or coefficient == stride
            stride *= self.extents[name]
        if not access.dynamic:
            return "0"
        if dense:
            return f"first + k * {self.apart}" if self.apart else "first"
        terms = [f"int({self.value(n)}) * {c}" for n, c in access.dynamic]
        return " + ".join(terms)

    def value(self, name: str) -> str:
        """A variable in the first lane of the vector at `base`."""
        moves = self.moves[name]
        return f"{self.rest[name]} + k * {moves}" if moves else self.rest[name]

    def is_aligned(self, access: Access) -> bool:
        """Whether every vector begins at a multiple of V elements, if its tensor does."""
        steps = (*access.strides, *(c * self._step_of(n) for n, c in access.dynamic))
        return all(step % self.V == 0 for step in steps)

    def _step_of(self, name: str) -> int:
        """By how much a variable changes from vector to vector, at least."""
        lanes = self.lane[name]
        return lanes[-1] + 1 if any(lanes) else 1
