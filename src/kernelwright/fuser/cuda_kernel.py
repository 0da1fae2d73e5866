"""What describes a generated kernel: its source, how tensors lie, and the arguments of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from .lowering import COMPLEX

ENTRY = "kernelwright_program"


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies that a program loads or stores."""

    strides: tuple[int, ...]
    dtype: torch.dtype

    def as_real(self) -> Tensor:
        """A complex tensor as one of pairs, any other one as it is."""
        if self.dtype not in COMPLEX:
            return self
        return Tensor((*(2 * s for s in self.strides), 1), COMPLEX[self.dtype])


@dataclass
class Kernel:
    """A kernel's source, and what it has to be given."""

    code: str
    block: int
    row_threads: int  # that share a row
    # (name, elements to add to its address), in the order of the kernel's arguments
    pointers: list[tuple[str, int]]
    # extents of the variables that count rows, outermost first
    extents: list[int]
    # what follows the pointers, and its types in the letters of the struct module
    numbers: list[int]
    layout: str
    alignment: int  # of every address, in elements of its dtype
    # blocks for each multiprocessor that loop over all rows, and vectors that a thread takes at
    # once; 0: as many blocks as there are rows
    resident: int = 0
    ahead: int = 1

    def grid(self, multiprocessors: int) -> int:
        blocks = -(-prod(self.extents) * self.row_threads // (self.block * self.ahead))
        return min(blocks, self.resident * multiprocessors) if self.resident else blocks


def divisor(size: int) -> tuple[int, int, int]:
    """`Divisor` of common.cuh: n // size is the upper word of n * factor, shifted, for n < 2^31.

    With 2^shift < size <= 2^(shift + 1) the factor exceeds 2^(32 + shift) / size by less than one,
    so the quotient by less than n / 2^(32 + shift) < 1 / size.
    """
    if size == 1:
        return 1, 0, 0  # nothing is divided by it
    shift = (size - 1).bit_length() - 1
    return size, -(-(1 << (32 + shift)) // size), shift
