"""A program: one kernel that makes one or several tensors, element by element or row by row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .expression import Expression, Load, Row, walk
from .index import Affine


@dataclass(frozen=True)
class Store:
    """A tensor that a program writes: at `index`, for all values of the variables. With `eight` it
    also writes the tensor's rows in fp8, with one scale each: see eight_bit_rows.py."""

    target: str
    index: tuple[Affine, ...]
    value: Expression
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    eight: bool = False


@dataclass(frozen=True)
class Program:
    """Variables with their extents, and what is stored for each combination of their values."""

    extents: tuple[tuple[str, int], ...]
    stores: tuple[Store, ...]

    @cached_property
    def loads(self) -> list[str]:
        """The names of the tensors it reads, each once."""
        found = (e.source for e in walk(*(s.value for s in self.stores)) if isinstance(e, Load))
        return list(dict.fromkeys(found))

    @cached_property
    def rows(self) -> list[Row]:
        return [e for e in walk(*(s.value for s in self.stores)) if isinstance(e, Row)]

    @cached_property
    def summed(self) -> set[str]:
        """The names of the tensors of which it sums rows."""
        found = walk(*(row.x for row in self.rows))
        return {e.source for e in found if isinstance(e, Load)}
