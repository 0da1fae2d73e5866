"""Pinned CPU memory for the 16-bit weights of fp8 layers.

PyTorch rounds pinned allocations up to powers of two, half as much again for the weights of FLUX:
here weights are slices of large blocks. CUDA fills and locks the pages of a block one after the
other, which takes seconds for a large model; so all cores fill a block first, and CUDA only locks
it.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils import dlpack

from .memory_blocks import MemoryBlocks


class PinnedMemory:
    """Hands out slices of large pinned blocks, each with a storage of its own that keeps its block
    alive."""

    def __init__(self) -> None:
        self._blocks = MemoryBlocks(_pinned)

    def like(self, weight: Tensor) -> Tensor:
        # blocks grow with what is asked for: a small model does not need a large one
        piece = self._blocks.take(weight.nbytes, self._blocks.total)
        alone = dlpack.from_dlpack(dlpack.to_dlpack(piece))
        return alone.view(weight.dtype).view(weight.shape)


def _pinned(size: int) -> Tensor:
    if torch.cuda.is_available():
        # a system may limit how much memory is locked; Windows has no such pages
        with suppress(RuntimeError, OSError, AttributeError):
            return _filled_and_locked(size)
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


class _Pages(mmap.mmap):
    """Memory of this process that CUDA has locked; a tensor made from it keeps it alive."""

    locked = 0  # its address

    def __del__(self) -> None:
        if self.locked and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def _filled_and_locked(size: int) -> Tensor:
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(pages, dtype=torch.uint8).zero_()  # by all threads of PyTorch
    status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
    if status:
        _clear_error()
        raise RuntimeError(f"cudaHostRegister: error {status}")
    pages.locked = block.data_ptr()
    return block


def _clear_error() -> None:
    """Have the error of a call of CUDA raised here, not by the next launch of somebody else."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
