"""Whether tensors still have the values that a cached result was computed from.

Version counters miss writes through `.data`, NumPy, DLPack, a storage or a custom kernel: peft
merges adapters that way, and diffusers' EMA copies weights that way. So a sample of the values is
kept with each cached result: all of a prompt, and the first row and column of each weight. A write
to a whole tensor, to whole rows or to whole columns is noticed; one to a few single elements that
bypasses the version counter is not. Of weights that rest on the CPU, which are compared by the
host, a few elements of the whole are kept.

The comparison is launched before a forward and read after it, while the GPU works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch import UntypedStorage as Storage

from ...backends.torch_internals import unowned_storage
from .sample_comparison import SampleComparison

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# elements of a weight that rests: each is a miss of the cache, 0.17 us, and FLUX has 500 weights
SPARSE = 16
PendingCheck = Callable[[], bool]  # waits for a comparison; True if all values are unchanged


def unchanged() -> bool:
    return True


class TensorSamples:
    """Samples of the tensors that cached results were computed from."""

    def __init__(self) -> None:
        self.epoch = 0  # number of calls of `forget`; part of the keys of cached results
        self._noted: dict[Any, _Sample] = {}
        self._comparison = _Comparison([], [])
        self._is_new = False  # whether something was noted that no comparison knows

    def __deepcopy__(self, memo: Any) -> TensorSamples:
        return TensorSamples()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, tensor: Tensor, whole: bool = False, sparse: bool = False) -> None:
        """Sample a tensor as it is now."""
        memory = tensor.untyped_storage()
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = memory.data_ptr(), layout
        # not of the tensor: torch.utils.swap_tensors refuses tensors with weak references
        alive = ref(memory, lambda _: self._noted.pop(key, None) and None)
        self._noted[key] = _Sample(alive, _bit_views(tensor, whole, sparse))
        self._is_new = True

    def forget(self) -> None:
        """Drop all samples, and invalidate the results cached with them."""
        self.epoch += 1
        self._noted, self._comparison = {}, _Comparison([], [])

    def check(self) -> PendingCheck:
        """Start to compare all samples with the tensors; the result waits for that work alone."""
        samples = list(self._noted.values())
        memories = [sample.alive() for sample in samples]  # nothing may free one meanwhile
        self._make(samples, memories)
        return pending(self._comparison.start())

    def prepare(self) -> None:
        """Make ready what the next check runs, while the GPU has work to do."""
        if self._is_new:
            samples = list(self._noted.values())
            self._make(samples, [sample.alive() for sample in samples])

    def _make(self, samples: list[_Sample], memories: list[Any]) -> None:
        self._is_new = False
        if not self._comparison.is_of(samples, memories):
            self._comparison = _Comparison(samples, memories)


class _Sample:
    """Values of a tensor, and where they lie in its storage, which it does not keep alive."""

    def __init__(self, alive: ref[Any], views: Sequence[Tensor]) -> None:
        self.alive = alive
        self.places = [(v.storage_offset(), v.shape, v.stride()) for v in views]
        self.values = [v.reshape(-1).clone() for v in views]


class _Comparison:
    """Compares samples with what their storages hold now; some are gone, or empty for the moment.
    The views are made once: making them anew for every forward took a twentieth of the host time of
    LTX-Video. They do not keep the storages alive."""

    def __init__(self, samples: list[_Sample], memories: list[Any]) -> None:
        self._samples, self._facts = samples, _facts(memories)
        now: list[Tensor] = []
        then: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for sample, memory in zip(samples, memories, strict=True):
                if memory is None or memory.nbytes() == 0:
                    continue
                values = sample.values
                seen = unowned_storage(memory.data_ptr(), values[0].device, memory.nbytes())
                now += [values[0].new_empty(0).set_(seen, *place) for place in sample.places]
                then += values
            self.start = SampleComparison(now, then)

    def is_of(self, samples: list[_Sample], memories: list[Any]) -> bool:
        same = self._facts is not None and self._samples == samples
        return same and self._facts == _facts(memories)


def _facts(memories: list[Any]) -> Any:
    """Where storages lie, and how large they are; None if one is gone."""
    try:
        return list(map(Storage.data_ptr, memories)), list(map(Storage.nbytes, memories))
    except TypeError:
        return None


def compare_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Whether the two tensors of each pair are equal: a boolean tensor a device and dtype."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    with torch.no_grad():
        for a, b in pairs:
            ours, theirs = groups.setdefault((a.device, a.dtype), ([], []))
            ours += [view.reshape(-1) for view in _bit_views(a, True)]
            theirs += [view.reshape(-1) for view in _bit_views(b, True)]
        return [(torch.cat(a) == torch.cat(b)).all() for a, b in groups.values()]


def pending(results: Sequence[Tensor]) -> PendingCheck:
    """Start to copy boolean results to the host; waits for them when called."""
    waits = list(map(_pending, results))
    return lambda: all(wait() for wait in waits)


def _bit_views(tensor: Tensor, whole: bool, sparse: bool = False) -> list[Tensor]:
    """Integer views of a tensor: all of it, its first row and column, or a few elements."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.uint8))
    if sparse and bits.is_contiguous() and bits.numel():
        # an odd step, or all elements could be of one column
        return [bits.view(-1)[:: max(1, bits.numel() // SPARSE) | 1]]
    if whole or bits.ndim < 2 or bits.numel() == 0:
        return [bits]
    column = bits
    while column.ndim > 1:
        column = column.select(-1, 0)
    return [bits[0], column]


def sample_views(tensors: Iterable[Tensor], sparse: bool = False) -> list[Tensor]:
    """Views of the first row and column of each tensor, or of a few elements."""
    return [view for tensor in tensors for view in _bit_views(tensor, False, sparse)]


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
