"""Which tensors the channel norm kernel can read."""

from __future__ import annotations

from torch import Tensor

MAX_CHANNELS = 1024  # a program holds all channels of a position


def problem(x: Tensor) -> str | None:
    """Why the kernel cannot read [B, C, *positions], or None if it can."""
    if x.ndim < 3:
        return f"it has {x.ndim} dimensions, expected a batch, channels and positions"
    if x.shape[1] > MAX_CHANNELS:
        return f"it has {x.shape[1]} channels, the kernel holds {MAX_CHANNELS}"
    expected = 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return "the positions of a channel do not lie side by side in memory"
        expected *= size
    return None
