"""The formula in plain PyTorch, and the eager chain that the exact mode equals."""

from __future__ import annotations

import torch
from torch import Tensor

from kernelwright.ops.row.reference import widen


def squared_relu(input: Tensor) -> Tensor:
    return torch.relu(widen(input)).square().to(input.dtype)


def eager(input: Tensor) -> Tensor:
    return torch.relu(input).square()
