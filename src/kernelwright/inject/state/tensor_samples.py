"""Whether tensors still have the values that a cached result was computed from.

Version counters miss writes through `.data`, NumPy, DLPack, a storage or a custom kernel: peft
merges adapters that way, and diffusers' EMA copies weights that way. So a sample of the values is
kept with each cached result: all of a prompt, and the first row and column of each weight. A write
to a whole tensor, to whole rows or to whole columns is noticed; one to a few single elements that
bypasses the version counter is not.

The comparison is launched before a forward and read after it, while the GPU works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PendingCheck = Callable[[], bool]  # waits for a comparison; True if all values are unchanged


def unchanged() -> bool:
    return True


class TensorSamples:
    """Samples of the tensors that cached results were computed from."""

    def __init__(self) -> None:
        self.epoch = 0  # number of calls of `forget`; part of the keys of cached results
        self._noted: dict[Any, tuple[ref[Any], Any, bool, list[Tensor]]] = {}

    def __deepcopy__(self, memo: Any) -> TensorSamples:
        return TensorSamples()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, tensor: Tensor, whole: bool = False) -> None:
        """Sample a tensor as it is now."""
        memory = tensor.untyped_storage()
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = memory.data_ptr(), layout
        sample = [view.clone() for view in _bit_views(tensor, whole)]
        # not of the tensor: torch.utils.swap_tensors refuses tensors with weak references
        alive = ref(memory, lambda _: self._noted.pop(key, None) and None)
        self._noted[key] = alive, layout, whole, sample

    def forget(self) -> None:
        """Drop all samples, and invalidate the results cached with them."""
        self.epoch += 1
        self._noted = {}

    def check(self) -> PendingCheck:
        """Start to compare all samples with the tensors; the result waits for that work alone."""
        now: list[Tensor] = []
        then: list[Tensor] = []
        for alive, layout, whole, sample in list(self._noted.values()):
            if (memory := alive()) is not None and memory.nbytes() > 0:
                now += _bit_views(_view_of(memory, *layout), whole)
                then += sample
        return pending(compare(now, then))


def compare_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Whether the two tensors of each pair are equal, as `compare`."""
    now: list[Tensor] = []
    then: list[Tensor] = []
    for a, b in pairs:
        now += _bit_views(a, True)
        then += _bit_views(b, True)
    return compare(now, then)


def pending(results: Sequence[Tensor]) -> PendingCheck:
    """Start to copy boolean results to the host; waits for them when called."""
    waits = list(map(_pending, results))
    return lambda: all(wait() for wait in waits)


def _view_of(memory: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A tensor with this layout in a storage."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)


def _bit_views(tensor: Tensor, whole: bool) -> list[Tensor]:
    """Integer views of a tensor: all of it, or its first row and column."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.uint8))
    if whole or bits.ndim < 2 or bits.numel() == 0:
        return [bits.reshape(-1)]
    if bits.ndim > 2:
        bits = bits.flatten(1)
    return [bits[0], bits[:, 0]]


def sample_views(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Views of the first row and column of each tensor."""
    return [view for tensor in tensors for view in _bit_views(tensor, False)]


def compare(now: Sequence[Tensor], then: Sequence[Tensor]) -> list[Tensor]:
    """Whether samples are equal: one boolean tensor for each device and dtype."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(now, then, strict=True):
        ours, theirs = groups.setdefault((a.device, a.dtype), ([], []))
        ours.append(a)
        theirs.append(b)
    with torch.no_grad():
        return [(torch.cat(ours) == torch.cat(theirs)).all() for ours, theirs in groups.values()]


def _pending(result: Tensor) -> PendingCheck:
    if not result.is_cuda:
        return lambda: bool(result)
    with torch.cuda.device(result.device):
        copy = torch.empty((), dtype=torch.bool, pin_memory=True)
        copy.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def wait() -> bool:
        done.synchronize()
        return bool(copy)

    return wait
