"""fp8 quantisation and the fp8 GEMM in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


def activated(x: Tensor, activation: str, up: Tensor | None, left: Tensor | None) -> Tensor:
    """[left, act(x) * up]"""
    y = ACTIVATIONS[activation](x)
    y = y if up is None else y * up
    return y if left is None else torch.cat([left, y], -1)


def quantize(
    x: Tensor, up: Tensor | None = None, activation: str = "none", left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[left, act(x) * up] in fp8 [..., L + K], and the scale of each row [..., 1]. The largest
    element of a row becomes the largest fp8 value."""
    up, left = (None if t is None else t.float() for t in (up, left))
    y = activated(x.float(), activation, up, left)
    largest = y.abs().amax(-1, keepdim=True) if y.shape[-1] else y.new_zeros(*y.shape[:-1], 1)
    largest = torch.where(largest == 0, LARGEST, largest)
    # reciprocal() rounds alike on CPU and GPU; LARGEST / largest does not
    return (y * (largest.reciprocal() * LARGEST)).to(DTYPE), largest * (1 / LARGEST)


def product(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(rows * scale) @ (weight * weight_scale)^T + bias, summed in float32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = F.linear(rows.to(wide), weight.to(wide)) * scale.to(wide) * weight_scale.to(wide).flatten()
    return (y if bias is None else y + bias.to(wide)).to(dtype)
