"""fp8 (e4m3) GEMMs with one scale per row of each operand.

Steps of a linear layer, not public ops: `quantize` quantises activations, `quantize_weight` a
weight, `product` multiplies them. None has a gradient.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...backends.torch_internals import scaled_mm
from .. import checks
from ..folder_kernels import FolderKernels
from ..op import Op
from . import reference
from .reference import ACTIVATIONS, DTYPE

MULTIPLE = 16  # tensor cores need both sizes of a weight to be multiples of it
# cuBLASLt of CUDA 13.0 has no kernel for some products of few rows with a bias and fast sums: up to
# 64 rows of 6144 with 1536 outputs, up to 32 of 12288 with 3072. With sums in float32 it has one
# for 64 rows of all that were tried; fewer are padded.
FEWEST = 64
FAST_SUMS = 256


def quantize(
    x: Tensor,
    up: Tensor | None = None,
    activation: str = "none",
    left: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """act(x) * up in fp8 [..., K], and the scale of each row [..., 1] in float32. With `left`
    [..., L] the rows are the concatenation [left, act(x) * up], [..., L + K].

    >>> rows, scale = quantize(torch.tensor([[1.0, -2.0]]))
    >>> rows.float() * scale
    tensor([[ 1., -2.]])
    """
    return QUANTIZE.run(x, up, activation, left, backend=backend)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in fp8, and the scale of each of its rows [N, 1]."""
    return reference.quantize(weight.detach())


def product(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(rows * scale) @ (weight * weight_scale)^T + bias: [..., K] -> [..., N] in `dtype`. Emulated
    in float32 where `problem` returns a reason."""
    if not rows.numel() or problem(rows.device, dtype, weight.shape, bias):
        return reference.product(rows, scale, weight, weight_scale, bias, dtype)
    flat, scales = rows.view(-1, rows.shape[-1]), scale.view(-1, 1)
    count = len(flat)
    if count < FEWEST:
        flat, scales = _padded(flat), _padded(scales)
    out = scaled_mm(
        flat,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scale.view(1, -1),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=count >= FAST_SUMS,
    )
    return out[:count].view(*rows.shape[:-1], -1)


def _padded(rows: Tensor) -> Tensor:
    """The rows, and then zeros up to FEWEST."""
    bits = rows.view(torch.uint8)  # zeros of any dtype
    return torch.cat([bits, bits.new_zeros(FEWEST - len(bits), bits.shape[1])]).view(rows.dtype)


def problem(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, bias: Tensor | None
) -> str | None:
    """Why tensor cores cannot run the GEMM with a weight of this shape, or None if they can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, it needs a CUDA GPU"
    if no := unsupported(device.index or 0):
        return no
    if dtype != torch.bfloat16:
        return f"rows with scales give bfloat16, not {dtype}"
    if shape[0] % MULTIPLE or shape[1] % MULTIPLE:
        return f"its weight is {list(shape)}, expected multiples of {MULTIPLE}"
    if bias is not None and bias.dtype != dtype:
        return f"its bias is {bias.dtype}, expected {dtype}"
    return None


@functools.lru_cache
def unsupported(device: int) -> str | None:
    """Why a GPU has no fp8 GEMM, or None if it has."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"eight-bit floats need compute capability 8.9, this GPU has {major}.{minor}"


def _check(x: Tensor, up: Tensor | None, activation: str, left: Tensor | None) -> None:
    checks.tensor("quantize", "x", x)
    checks.choice("quantize", "activation", activation, tuple(ACTIVATIONS))
    if up is not None:
        checks.like("quantize", "up", up, x, "x")
    if left is not None:
        checks.tensor("quantize", "left", left)
        if left.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"quantize: left has shape {list(left.shape)}, x has {list(x.shape)}; "
                f"expected one number of rows"
            )


def _allocate(
    x: Tensor, up: Tensor | None, activation: str, left: Tensor | None
) -> tuple[Tensor, ...]:
    *lead, width = x.shape
    if left is not None:
        width += left.shape[-1]
    return (
        torch.empty((*lead, width), dtype=DTYPE, device=x.device),
        torch.empty((*lead, 1), dtype=torch.float32, device=x.device),
    )


QUANTIZE = Op(
    name="quantize",
    schema='(Tensor x, Tensor? up=None, str activation="none", Tensor? left=None) '
    "-> (Tensor, Tensor)",
    formula="q, s: q · s is left, act(x) · up",
    check=_check,
    allocate=_allocate,
    reference=reference.quantize,
    kernels=FolderKernels(__name__),
    cases=(),
    sized=lambda inputs, rows, width, chain: {"x": inputs.normal(rows, width), "up": None},
    outputs=("out", "scale"),
    prefer=("cuda", "triton"),
    internal=True,
)
