"""The parts of a row op in plain PyTorch, and the eager chains of exact modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def widen(t: Tensor) -> Tensor:
    """float16 and bfloat16 to float32; float32 and float64 as they are."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def normalize(x: Tensor, kind: str, eps: float) -> Tensor:
    """norm(x) over the last dimension: "rms", "layer" or "none"."""
    if kind == "layer":
        x = centred(x)
    if kind in ("rms", "layer"):
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return x


def centred(x: Tensor) -> Tensor:
    """x - mean(x)"""
    x = x - x.mean(-1, keepdim=True)
    # the deviations sum to the rounding error of a large mean: subtract it
    return x - x.mean(-1, keepdim=True)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """x * weight + bias"""
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def modulated(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """x * (1 + scale) + shift"""
    if scale is not None:
        x = x * (1 + spread(scale, x))
    return x if shift is None else x + spread(shift, x)


def spread(t: Tensor, x: Tensor) -> Tensor:
    """A modulation [D], [B, D], [B, 1, D], [B, S, D] or [B, F, 1, D] shaped to broadcast over x."""
    if t.ndim == 2 and x.ndim > 2:
        return t.reshape(t.shape[0], *[1] * (x.ndim - 2), t.shape[1])
    if t.ndim == x.ndim + 1:
        tokens = x.shape[1] // t.shape[1] if t.shape[1] else 0
        return t.expand(*t.shape[:2], tokens, *t.shape[3:]).flatten(1, 2)
    return t


def summed(grad: Tensor, like: Tensor) -> Tensor:
    """The sum of a gradient [..., D] over the rows that share `like`, in its shape and dtype."""
    if like.ndim == grad.ndim + 1:
        frames = like.shape[1]
        tokens = grad.shape[1] // frames if frames else 0
        grad = grad.reshape(grad.shape[0], frames, tokens, *grad.shape[2:])
        shape = like.shape
    elif like.ndim == 2 and grad.ndim > 2:
        shape = torch.Size((like.shape[0], *[1] * (grad.ndim - 2), like.shape[1]))
    else:
        shape = like.shape
    return grad.sum_to_size(shape).reshape(like.shape).to(like.dtype)


def torch_norm(
    x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """F.rms_norm or F.layer_norm."""
    if kind == "rms":
        return affine(F.rms_norm(x, x.shape[-1:], weight, eps), None, bias)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) if kind == "layer" else x


def diffusers_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """diffusers.models.normalization.RMSNorm without bias."""
    dtype = x.dtype
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    if weight is None:
        return x.to(dtype)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return x * weight


def transformers_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """LlamaRMSNorm; other models of transformers have the same code."""
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    x = x.to(dtype)
    return x if weight is None else weight * x


def eager_norm(
    x: Tensor, chain: str, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The norm as the library named by `chain` runs it."""
    if kind == "rms" and chain == "diffusers":
        return affine(diffusers_rms_norm(x, weight, eps), None, bias)
    if kind == "rms" and chain == "transformers":
        return affine(transformers_rms_norm(x, weight, eps), None, bias)
    if chain == "wan":  # float32 throughout
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
        return torch_norm(x.float(), kind, weight, bias, eps)
    return torch_norm(x, kind, weight, bias, eps)
