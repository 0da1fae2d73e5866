"""A quantised layer for the few rows of decoding: the weight in fp8, the rows in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.few_rows import FP8_LINEAR_FEW_ROWS, is_few, problem
from ...ops.fp8.reference import ACTIVATIONS
from ...ops.glu import SILU_MUL


def activated(x: Tensor, activation: str, up: Tensor | None, left: Tensor | None) -> Tensor:
    """[left, act(x) * up] in 16 bits."""
    if activation == "silu" and up is not None:
        y = SILU_MUL(x, up)
    else:
        y = ACTIVATIONS[activation](x)
        y = y if up is None else y * up
    return y if left is None else torch.cat([left, y], -1)


def of_few_rows(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, gated: bool = False
) -> Tensor | None:
    """The layer of a weight in fp8 and rows in 16 bits, if they are few and a kernel takes them."""
    if not is_few(x) or (x.is_cuda and problem(x, weight, bias)):
        return None
    return FP8_LINEAR_FEW_ROWS(x, weight, scale, bias, gated)
