"""A quantised layer for the few rows of decoding: the weight in fp8, the rows in 16 bits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...backends.user_warnings import warn
from ...ops.few_rows import EIGHT_BIT_LINEAR_FEW_ROWS, is_few, problem
from ...ops.few_rows.reference import eight_bit_linear_few_rows
from ...ops.fp8 import reference
from ...ops.glu import SILU_MUL
from ..graphs.capture import capturing
from ..runtime.informative import informative
from ..verify import accuracy

# both sum in float32 and round once, to eight bits of mantissa
MOST_ERROR = 2**-8


def activated(x: Tensor, activation: str, up: Tensor | None, left: Tensor | None) -> Tensor:
    """[left, act(x) * up] in 16 bits; a gated SiLU by its kernel."""
    if activation == "silu" and up is not None:
        return reference.activated(SILU_MUL(x, up), "none", None, left)
    return reference.activated(x, activation, up, left)


class Weights(Protocol):
    """A weight in fp8; `few` says whether the kernel's result was near, None before it was seen."""

    weight: Tensor
    scale: Tensor
    few: bool | None


def of_few_rows(
    kept: Weights, x: Tensor, bias: Tensor | None, gated: bool = False
) -> Tensor | None:
    """The layer of a weight in fp8 and rows in 16 bits, if they are few and a kernel takes them.
    The first result is compared with that of PyTorch's ops."""
    if kept.few is False or not is_few(x) or (x.is_cuda and problem(x, kept.weight, bias)):
        return None
    if kept.few is None and capturing():
        return None
    y = EIGHT_BIT_LINEAR_FEW_ROWS(x, kept.weight, kept.scale, bias, gated)
    if kept.few is None:
        expected = eight_bit_linear_few_rows(x, kept.weight, kept.scale, bias, gated)
        if not informative(expected):
            return expected  # zeros and NaN prove nothing
        kept.few = accuracy.error(y, expected) <= MOST_ERROR
        if not kept.few:
            warn("the kernel for few rows of an fp8 layer is off; its GEMM runs instead")
            return None
    return y
