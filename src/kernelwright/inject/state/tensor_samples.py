"""Whether tensors still hold the values that something was made of.

PyTorch counts who writes to a tensor, but not through `.data`, NumPy, DLPack, a storage or a kernel
of one's own: peft merges adapters that way, diffusers' EMA copies weights that way. So what is kept
beside a result is also a sample of the values it was made of: all of a text, and of each weight the
first row and the first column. Whoever writes a whole tensor, whole rows or whole columns is found
out; a few single elements written behind PyTorch's back are not.

The check is launched before a forward and read after it, while the GPU works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Answer = Callable[[], bool]


def unchanged() -> bool:
    return True


class Contents:
    """Samples of tensors, as they were when they were noted."""

    def __init__(self) -> None:
        self.epoch = 0  # how often all of it was forgotten, and with it what was made of it
        self._noted: dict[Any, tuple[ref[Any], Any, bool, list[Tensor]]] = {}

    def __deepcopy__(self, memo: Any) -> Contents:
        return Contents()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, tensor: Tensor, whole: bool = False) -> None:
        """Remember what is in a tensor now."""
        memory = tensor.untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = memory.data_ptr(), place
        sample = [words.clone() for words in _words(tensor, whole)]
        # not of the tensor: one with weak references cannot be swapped (torch.utils.swap_tensors)
        found = ref(memory, lambda _: self._noted.pop(key, None) and None)
        self._noted[key] = found, place, whole, sample

    def forget(self) -> None:
        """Give up everything that was made of these tensors."""
        self.epoch += 1
        self._noted = {}

    def check(self) -> Answer:
        """Begin to compare all that is noted with what is there now; the answer waits for that
        alone."""
        return told(self.compared())

    def compared(self) -> list[Tensor]:
        """Whether all that is noted is there still: one value for each device and dtype."""
        now: list[Tensor] = []
        then: list[Tensor] = []
        for found, place, whole, sample in list(self._noted.values()):
            if (memory := found()) is not None and memory.nbytes() > 0:
                now += _words(_in(memory, *place), whole)
                then += sample
        return compared(now, then)


def copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Whether pairs of tensors hold the same."""
    both = [(a, b) for pair in pairs for a, b in zip(*(_words(t, True) for t in pair), strict=True)]
    return compared([a for a, _ in both], [b for _, b in both])


def told(answers: Sequence[Tensor]) -> Answer:
    """All of these, to be asked for when the device has got so far."""
    waits = list(map(_told, answers))
    return lambda: all(wait() for wait in waits)


def _in(memory: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of this layout in a storage."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)


def _words(tensor: Tensor, whole: bool) -> list[Tensor]:
    """Views of a tensor's bits, as integers."""
    bits = tensor.detach().view(INTEGERS.get(tensor.element_size(), torch.uint8))
    if whole or bits.ndim < 2 or bits.numel() == 0:
        return [bits.reshape(-1)]
    if bits.ndim > 2:
        bits = bits.flatten(1)
    return [bits[0], bits[:, 0]]


def samples(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Views of the first row and column of each tensor."""
    return [words for tensor in tensors for words in _words(tensor, False)]


def compared(now: Sequence[Tensor], then: Sequence[Tensor]) -> list[Tensor]:
    """Whether samples are the same: one value for each device and dtype."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(now, then, strict=True):
        ours, theirs = groups.setdefault((a.device, a.dtype), ([], []))
        ours.append(a)
        theirs.append(b)
    with torch.no_grad():
        return [(torch.cat(ours) == torch.cat(theirs)).all() for ours, theirs in groups.values()]


def _told(same: Tensor) -> Answer:
    if not same.is_cuda:
        return lambda: bool(same)
    with torch.cuda.device(same.device):
        copy = torch.empty((), dtype=torch.bool, pin_memory=True)
        copy.copy_(same, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def answer() -> bool:
        done.synchronize()
        return bool(copy)

    return answer
