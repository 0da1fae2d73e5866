"""Which weights lie on the CPU because the GPU does not need them: their layers run in fp8."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# by storage: torch.utils.swap_tensors refuses parameters that have weak references
_storages: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_at_rest(weight: Tensor) -> None:
    """Note that a weight was moved to where it lies now, and that nothing on the GPU reads it."""
    _storages[weight.untyped_storage()] = True


def is_at_rest(weight: Any) -> bool:
    """Whether a weight was moved away from its model's GPU. It may lie on another device than what
    its layer is given."""
    if not _storages or weight.device.type != "cpu":
        return False
    try:
        return weight.untyped_storage() in _storages
    except NotImplementedError:  # a tensor of a transform of torch.func has no storage
        return False
