"""GELU in plain PyTorch, and the eager call whose bits the exact mode has."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..row.reference import widen


def gelu(input: Tensor, approximate: bool) -> Tensor:
    return eager(widen(input), approximate).to(input.dtype)


def eager(input: Tensor, approximate: bool) -> Tensor:
    return F.gelu(input, approximate="tanh" if approximate else "none")
