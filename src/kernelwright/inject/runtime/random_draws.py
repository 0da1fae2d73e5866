"""Whether a forward drew random numbers: the generators are read, and never set back, for other
threads draw from them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree


def so_far(args: Any, kwargs: Any) -> list[bytes]:
    """The state of the generators that a forward with these inputs may draw from."""
    leaves = pytree.tree_leaves((args, kwargs))
    return of({t.device for t in leaves if isinstance(t, Tensor) and t.is_cuda})


def of(devices: set[torch.device]) -> list[bytes]:
    """The state of PyTorch's generator for the CPU, and of those for some GPUs."""
    states = [torch.default_generator.get_state()]
    states += [torch.cuda.get_rng_state(device) for device in sorted(devices, key=str)]
    return [state.numpy().tobytes() for state in states]
