"""A linear layer in plain PyTorch, summed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..row.reference import widen


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, glu: bool) -> Tensor:
    scale = torch.ones((), dtype=widen(x).dtype, device=x.device)
    return fp8_linear_few_rows(x, weight, scale, bias, glu)


def fp8_linear_few_rows(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, glu: bool
) -> Tensor:
    wide = widen(x)
    y = F.linear(wide, weight.to(wide.dtype)) * scale.to(wide.dtype).flatten()
    if bias is not None:
        y = y + bias.to(wide.dtype)
    if glu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(x.dtype)
