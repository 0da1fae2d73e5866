"""Norms as layers of a Hub kernel: stateless, `self` is the module whose forward they replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.layernorm import layernorm
from ...ops.rmsnorm import rmsnorm

HALF = (torch.float16, torch.bfloat16)


class RMSNorm(nn.Module):
    """LlamaRMSNorm and its twins: `weight`, `variance_epsilon`."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return scaled(hidden_states, self.weight, self.variance_epsilon)


class DiffusersRMSNorm(nn.Module):
    """diffusers.models.normalization.RMSNorm: `weight` and `bias` or None, `eps`."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        rows = scaled(hidden_states, weight, self.eps)
        if weight is not None and weight.dtype in HALF:
            rows = rows.to(weight.dtype)
        return rows if bias is None else rows + bias


class TorchRMSNorm(nn.Module):
    """torch.nn.RMSNorm: `weight` or None; `eps`, or None for torch's default of the dtype."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor | None
    eps: float | None
    normalized_shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1 or self.eps is None:
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return scaled(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm and diffusers' FP32LayerNorm: `weight` and `bias` or None, `eps`."""

    can_torch_compile = True
    has_backward = True

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    normalized_shape: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if len(self.normalized_shape) > 1 or (weight is None) != (bias is None):
            return type(self).forward(self, input)
        return layernorm(input, weight, bias, self.eps)


def scaled(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rmsnorm(x) * weight, in the dtype that eager promotes the two to."""
    if weight is None:
        return rmsnorm(x, None, eps)
    return rmsnorm(x.to(torch.promote_types(x.dtype, weight.dtype)), weight, eps)


Parts = tuple[str, Tensor | None, Tensor | None, float]


def plain(norm: Any, *beside: Tensor) -> Parts | None:
    """Kind, weight, bias and eps of a norm that a kernel can replace: its class is known, it has no
    hooks, and its weights have the dtype of the other tensors. Otherwise None."""
    place, name = type(norm).__module__, type(norm).__name__
    diffusers = place == "diffusers.models.normalization"
    if type(norm) is nn.LayerNorm or (diffusers and name == "FP32LayerNorm"):
        kind = "layer"
    elif type(norm) is nn.RMSNorm or (diffusers and name == "RMSNorm"):
        kind = "rms"
    else:
        return None
    weight, bias = norm.weight, getattr(norm, "bias", None)
    if len(getattr(norm, "normalized_shape", ())) > 1 or (kind == "rms" and bias is not None):
        return None
    if norm.eps is None:
        return None  # torch chooses one by dtype and device
    if norm._forward_hooks or norm._forward_pre_hooks:
        return None
    dtype = beside[0].dtype
    if any(t is not None and t.dtype != dtype for t in (weight, bias, *beside)):
        return None
    return kind, weight, bias, norm.eps
