"""Slices of large blocks of memory.

Of a GPU for fp8 weights: when a layer was quantised its 16-bit weight is freed, and PyTorch would
put the fp8 weight of the next layer into one half of that memory, or between activations, and what
is left there can then not be given back. FLUX had 18.8 GiB reserved so, of which 14.3 were in use.
So the blocks are in a pool of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

SMALLEST, LARGEST = 2**22, 2**29
BLOCKS = 16  # of the weights of a model: one of them may stay empty
ALIGNED = 256


class MemoryBlocks:
    """Hands out slices of blocks that `allocate` makes, of the size that is asked for last. A block
    is freed with its last slice."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._block, self._used = torch.empty(0, dtype=torch.uint8), 0
        self.total = 0  # bytes of all blocks
        self._lock = threading.Lock()

    def take(self, size: int, block: int) -> Tensor:
        """Bytes that are nobody else's, of a block of about so many bytes."""
        with self._lock:
            begin = -(-self._used // ALIGNED) * ALIGNED
            if begin + size > self._block.numel():
                block = min(LARGEST, max(SMALLEST, block))
                if size > block // 4:  # the end of a block would stay unused
                    self.total += size
                    return self._allocate(size)
                self._block, begin = self._allocate(block), 0
                self.total += block
            self._used = begin + size
            return self._block[begin : begin + size]


class GpuBlocks:
    """Slices of blocks on each device."""

    def __init__(self) -> None:
        self._on: dict[torch.device, MemoryBlocks] = {}
        self._pools: dict[torch.device, _Pool] = {}
        self.expected = 0  # bytes of all tensors

    def copy_of(self, t: Tensor, instead: Tensor | None = None) -> Tensor:
        """A copy of a contiguous tensor in a slice; in that of another one, which nobody reads any
        more, if it is as large."""
        if instead is not None and (instead.device, instead.shape) == (t.device, t.shape):
            piece = instead.view(torch.uint8)
        else:
            piece = self._of(t.device).take(t.nbytes, self.expected // BLOCKS)
        copy = piece.view(t.dtype).view(t.shape)
        copy.view(torch.uint8).copy_(t.view(torch.uint8))  # not every device copies fp8 tensors
        return copy

    def alone(self, t: Tensor) -> Tensor:
        """A copy of a contiguous tensor that is no slice, beside the blocks."""
        memory = self._pool(t.device).empty(t.nbytes)
        return memory.view(t.dtype).view(t.shape).copy_(t)

    def _of(self, device: torch.device) -> MemoryBlocks:
        if device not in self._on:
            self._on[device] = MemoryBlocks(self._pool(device).block)
        return self._on[device]

    def _pool(self, device: torch.device) -> _Pool:
        if device not in self._pools:
            self._pools[device] = _Pool(device)
        return self._pools[device]


class _Pool:
    """Allocates on a device; on a GPU in a pool, whose memory PyTorch uses for nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        if device.type == "cuda":
            with torch.cuda.device(device), suppress(RuntimeError):  # not every allocator has pools
                self._pool = torch.cuda.MemPool()

    def block(self, size: int) -> Tensor:
        """Many bytes; what was just freed may be needed for them."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self.empty(size)

    def empty(self, size: int) -> Tensor:
        if self._pool is not None:
            try:
                with torch.cuda.use_mem_pool(self._pool, self._device):
                    return self._empty(size)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # some settings of the allocator exclude pools
                self._pool = None
        return self._empty(size)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors as one, if each begins where the one before it ends; else None."""
    first = pieces[0]
    end = first.data_ptr()
    for piece in pieces:
        same = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not piece.is_contiguous() or piece.data_ptr() != end:
            return None
        end += piece.nbytes
    rows = sum(len(piece) for piece in pieces)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
