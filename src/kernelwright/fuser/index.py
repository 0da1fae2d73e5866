"""Index arithmetic: which element of a tensor an element of another one is made of.

A program iterates over *variables* with fixed extents. An index is affine in them, one `Affine` for
each dimension of a tensor. Reshapes regroup dimensions; where a variable would then lie in two of
them it is split into an outer and an inner one, and the program is built anew with those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any


class CannotIndex(Exception):
    """An index that is not affine in any split of the variables: a tensor has to be stored, so that
    it is loaded there. `node` is the one that could not be built."""

    node: Any = None


@dataclass(frozen=True)
class Split(Exception):
    """Variable `name` has to become `name_outer * inner + name_inner`."""

    name: str
    inner: int


@dataclass(frozen=True)
class Cut(Exception):
    """The range of variable `name` has to be cut at `border`: its parts are made differently."""

    name: str
    border: int


@dataclass(frozen=True)
class Affine:
    """constant + sum of coefficient * variable"""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(terms: Mapping[str, int], constant: int = 0) -> Affine:
        return Affine(constant, tuple(sorted((n, c) for n, c in terms.items() if c)))

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.constant + other, self.terms)
        total = dict(self.terms)
        for name, coefficient in other.terms:
            total[name] = total.get(name, 0) + coefficient
        return Affine.of(total, self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        return Affine.of({n: c * factor for n, c in self.terms}, self.constant * factor)

    def without(self, name: str, value: int) -> Affine:
        """The same where a variable has this value."""
        coefficient = dict(self.terms).get(name, 0)
        terms = tuple(t for t in self.terms if t[0] != name)
        return Affine(self.constant + coefficient * value, terms)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n for n, _ in self.terms)

    def __str__(self) -> str:
        parts = [f"{c}*{n}" if c != 1 else n for n, c in self.terms]
        return " + ".join([*parts, str(self.constant)] if self.constant or not parts else parts)


@dataclass
class Space:
    """The variables of a program and their extents, in the order of its rows and columns."""

    extents: dict[str, int] = field(default_factory=dict)

    def new(self, extent: int, prefix: str = "i") -> Affine:
        """A new variable as an index; a dimension of one element needs none."""
        if extent == 1:
            return Affine()
        name = f"{prefix}{len(self.extents)}"
        self.extents[name] = extent
        return Affine(0, ((name, 1),))

    def largest(self, index: Affine) -> int:
        return index.constant + sum(c * (self.extents[n] - 1) for n, c in index.terms)

    def ravelled(self, index: Sequence[Affine], shape: Sequence[int]) -> Affine:
        """The number of an element in the order of rows."""
        total = Affine()
        for part, size in zip(index, shape, strict=True):
            total = total * size + part
        return total

    def unravelled(self, number: Affine, shape: Sequence[int]) -> list[Affine]:
        """The index of the element of this number in a tensor of `shape`."""
        index: list[Affine] = []
        for size in reversed(shape):
            number, inside = self.divided(number, size)
            index.append(inside)
        return index[::-1]

    def divided(self, number: Affine, size: int) -> tuple[Affine, Affine]:
        """number // size and number % size"""
        if size == 1:
            return number, Affine()
        above: dict[str, int] = {}
        inside: dict[str, int] = {}
        for name, coefficient in number.terms:
            if coefficient % size == 0:
                above[name] = coefficient // size
            else:
                inside[name] = coefficient
        outer, rest = divmod(number.constant, size)
        found = Affine.of(inside, rest)
        if self.largest(found) >= size:
            self._split(found, size)
        return Affine.of(above, outer), found

    def _split(self, index: Affine, size: int) -> None:
        """Raise the split of a variable that reaches beyond `size`."""
        for name, coefficient in index.terms:
            extent = self.extents[name]
            if size % coefficient == 0 and coefficient * extent > size:
                inner = size // coefficient
                if extent % inner == 0 and 1 < inner < extent:
                    raise Split(name, inner)
        raise CannotIndex(f"{index} in {size}")


def position(index: Sequence[Affine], strides: Sequence[int]) -> Affine:
    """Where the element at an index lies in memory, counted in elements."""
    total = Affine()
    for part, stride in zip(index, strides, strict=True):
        total = total + part * stride
    return total


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
