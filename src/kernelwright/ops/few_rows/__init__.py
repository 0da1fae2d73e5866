"""Linear layers of a few rows, as decoding of language models has them: each weight is read once,
at the speed of memory. Up to two rows with a weight in 16 bits, and up to sixteen with one in eight
(fp8 or int8), which has a scale for each output.

A step of other layers, not a public op. Sums are in float32, and in another order than cuBLAS has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..folder_kernels import FolderKernels
from ..fp8.reference import DTYPE as FP8
from ..op import Op
from . import cases, reference
from .reference import quantize_to_integers as quantize_to_integers

MOST_ROWS = 16
MOST_ROWS_16_BITS = 2  # with more, cuBLAS reads weights as fast
ALIGNED = 16  # bytes of a weight that a thread loads at once


def is_eight_bits(weight: Tensor) -> bool:
    return weight.dtype in (FP8, torch.int8)


def most_rows(weight: Tensor) -> int:
    return MOST_ROWS if is_eight_bits(weight) else MOST_ROWS_16_BITS


def is_few(x: Tensor) -> bool:
    """Whether x has rows, and few of them."""
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1]


def suits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel is to compute this layer, here and now."""
    if not is_few(x) or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return not torch.is_autocast_enabled(x.device.type) and problem(x, weight, bias) is None


def problem(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why the kernel cannot compute this layer, or None if it can."""
    if not x.is_cuda or weight.device != x.device:
        return f"tensors are on {x.device.type}, it needs a CUDA GPU"
    same = weight.dtype == x.dtype or is_eight_bits(weight)
    if x.dtype not in (torch.bfloat16, torch.float16) or not same:
        return f"x is {x.dtype}, its weight {weight.dtype}; expected 16 bits"
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        return f"its bias is {bias.dtype}, expected {x.dtype}"
    width = weight.shape[-1]
    most = most_rows(weight)
    if not 0 < x.numel() <= most * width:
        return f"more than {most} rows, or none"
    if not x.is_contiguous() or not weight.is_contiguous():
        return "a tensor is not contiguous"
    if width * weight.element_size() % ALIGNED:
        return f"its rows are {width} wide"
    if any(t.data_ptr() % ALIGNED for t in (x, weight)):
        return f"a tensor does not start at a multiple of {ALIGNED} bytes"
    return None


def _check_sizes(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, glu: bool) -> None:
    checks.tensor(op, "x", x)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{op}: weight is {list(weight.shape)}, x has rows of {x.shape[-1]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias is {list(bias.shape)}, expected [{len(weight)}]")
    if glu and (bias is not None or len(weight) % 2):
        raise ValueError(f"{op}: glu takes gate and up in one weight, without a bias")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, glu: bool) -> None:
    _check_sizes("linear_few_rows", x, weight, bias, glu)


def _check_eight(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, glu: bool) -> None:
    op = "eight_bit_linear_few_rows"
    _check_sizes(op, x, weight, bias, glu)
    if not is_eight_bits(weight):
        raise TypeError(f"{op}: weight is {weight.dtype}, expected {FP8} or int8")
    if scale.dtype != torch.float32 or scale.numel() != len(weight):
        raise ValueError(f"{op}: scale is {list(scale.shape)}, expected {len(weight)} of float32")


def _allocate(x: Tensor, weight: Tensor, glu: bool) -> tuple[Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], len(weight) // (2 if glu else 1))),)


LINEAR_FEW_ROWS = Op(
    name="linear_few_rows",
    schema="(Tensor x, Tensor weight, Tensor? bias=None, bool glu=False) -> Tensor",
    formula="x · weightᵀ + bias; with glu SiLU(first half) · second half of it",
    check=_check,
    allocate=lambda x, weight, bias, glu: _allocate(x, weight, glu),
    reference=reference.linear_few_rows,
    kernels=FolderKernels(__name__),
    cases=cases.CASES,
    sized=cases.sized,
    prefer=("cuda",),
    backends=("torch", "cuda"),
    internal=True,
    category="GEMM",
)

EIGHT_BIT_LINEAR_FEW_ROWS = Op(
    name="eight_bit_linear_few_rows",
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None, bool glu=False) -> Tensor",
    formula="x · (weight · scale)ᵀ + bias; with glu SiLU(first half) · second half of it",
    check=_check_eight,
    allocate=lambda x, weight, scale, bias, glu: _allocate(x, weight, glu),
    reference=reference.eight_bit_linear_few_rows,
    kernels=FolderKernels(__name__),
    cases=cases.EIGHT_BIT_CASES,
    sized=cases.sized_eight,
    prefer=("cuda",),
    backends=("torch", "cuda"),
    internal=True,
    category="GEMM",
    eight=("weight",),
)
