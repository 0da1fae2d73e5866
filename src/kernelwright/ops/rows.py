"""Rows and their strides: operands broadcast, with as few leading dimensions as possible.

Kernels see a tensor as rows of its last dimension. Leading dimensions are merged where every
operand's strides permit, so a contiguous [B, S, D] is one dimension of B*S rows, and the same with
a modulation [B, 1, D] beside it is two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..backends import Unsupported

MAX_DIMS = 3
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """`sizes`: 1 to 3 row dimensions, outermost first. `strides`: the same for each operand, in
    elements, None for an absent one."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...]

    @property
    def count(self) -> int:
        total = 1
        for n in self.sizes:
            total *= n
        return total

    def padded(self) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]]:
        """Sizes and strides on exactly three dimensions; absent operands get zeros."""
        lead = MAX_DIMS - len(self.sizes)
        sizes = (1,) * lead + self.sizes
        strides = [(0,) * lead + (s or (0,) * len(self.sizes)) for s in self.strides]
        return sizes, strides  # type: ignore[return-value]


def rows_of(shape: Sequence[int], operands: Sequence[Tensor | None]) -> Rows:
    """The rows of `shape[:-1]`, for operands that broadcast to it."""
    lead = tuple(shape[:-1])
    strides = [None if t is None else _broadcast_strides(t, lead) for t in operands]
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim in range(len(lead)):
        if lead[dim] == 1:
            continue
        if sizes and all(
            s is None or m[-1] == s[dim] * lead[dim] for s, m in zip(strides, merged, strict=True)
        ):
            sizes[-1] *= lead[dim]
            for s, m in zip(strides, merged, strict=True):
                if s is not None:
                    m[-1] = s[dim]
        else:
            sizes.append(lead[dim])
            for s, m in zip(strides, merged, strict=True):
                if s is not None:
                    m.append(s[dim])
    if not sizes:
        sizes = [1]
        merged = [[0] for _ in strides]
    if len(sizes) > MAX_DIMS:
        raise Unsupported(f"leading dimensions {list(lead)} cannot be merged into {MAX_DIMS}")
    rows = Rows(
        tuple(sizes),
        tuple(None if s is None else tuple(m) for s, m in zip(strides, merged, strict=True)),
    )
    if rows.count > MAX_ROWS:
        raise Unsupported(f"{rows.count} rows; a launch holds up to {MAX_ROWS}")
    return rows


def _broadcast_strides(t: Tensor, lead: tuple[int, ...]) -> tuple[int, ...]:
    missing = len(lead) - (t.ndim - 1)
    own = [0 if n == 1 else s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return (0,) * missing + tuple(own)


def vector_width(width: int, itemsize: int, alignment: int, strides: Sequence[int]) -> int:
    """Elements of one vectorised access: up to 16 bytes, and every row starts on a multiple."""
    v = max(1, min(16, alignment) // itemsize)
    while v > 1 and (width % v or any(s % v for s in strides)):
        v //= 2
    return v


def has_gaps(t: Tensor) -> bool:
    """Whether there are gaps between the elements of a row."""
    return t.ndim > 0 and t.shape[-1] > 1 and t.stride(-1) != 1


def with_dense_rows(args: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments as kernels read them."""
    return tuple(a.contiguous() if isinstance(a, Tensor) and has_gaps(a) else a for a in args)
