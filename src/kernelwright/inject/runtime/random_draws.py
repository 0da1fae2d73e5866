"""Whether a forward drew random numbers. Generator states are read, and never set back: other
threads draw from them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.torch_internals import pytree


def generator_states(args: Any, kwargs: Any) -> list[bytes]:
    """The states of the generators that a forward with these inputs may draw from."""
    leaves = pytree.tree_leaves((args, kwargs))
    return states_of({t.device for t in leaves if isinstance(t, Tensor) and t.is_cuda})


def states_of(devices: set[torch.device]) -> list[bytes]:
    """The states of PyTorch's default generators for the CPU and these GPUs."""
    states = [torch.default_generator.get_state()]
    states += [torch.cuda.get_rng_state(device) for device in sorted(devices, key=str)]
    return [state.numpy().tobytes() for state in states]
