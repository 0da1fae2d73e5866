"""The formula in plain PyTorch, and the eager chain that the exact mode equals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelwright.ops.row.reference import affine, widen


def norm_then_gate(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = widen(input)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return (affine(x, weight) * F.silu(widen(gate))).to(input.dtype)


def eager(input: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Qwen3NextRMSNormGated: the norm is rounded, the gate is applied in float32."""
    x = input.to(torch.float32)
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(input.dtype)
    x = x if weight is None else weight * x
    return (x * F.silu(gate.to(torch.float32))).to(input.dtype)
