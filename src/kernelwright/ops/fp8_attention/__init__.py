"""Attention in eight bits: scales finer than a tensor, results in 16 bits.

Values and probabilities are fp8 (e4m3). Query and key are int8: tensor cores multiply both at one
rate, and with a scale for each row int8 has a third of fp8's error, 0.9% against 2.6%, unless a row
has an outlier. The whole is off by 4.3% on Gaussian inputs.

Two steps, not public ops: `QUANTIZE_KV` writes key and value in eight bits, in tiles that are
copied to shared memory as they are; `FP8_ATTENTION` quantises its queries and attends. Neither has
a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.cuda import problem as cuda_problem
from .. import checks, selection
from ..folder_kernels import FolderKernels
from ..fp8 import unsupported
from ..fp8.reference import DTYPE
from ..op import Op
from . import reference
from .reference import ROWS, padded

HEAD_DIMS = (64, 128)


def fp8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
) -> Tensor:
    """softmax(query @ key^T * scale) @ value with operands and probabilities in eight bits:
    [B, H, Sq, D], [B, H, Sk, D], [B, H, Sk, D] -> [B, H, Sq, D].

    >>> x = torch.ones(1, 1, 2, 64, dtype=torch.bfloat16)
    >>> fp8_attention(x, x, x).flatten()[:2]
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    _check_heads("fp8_attention", query=query, key=key, value=value)
    if query.is_cuda and selection.surrounding() == "auto":
        # raises where there is no kernel: plain PyTorch would hold all scores
        with selection.use_backend("cuda"):
            return _attend(query, key, value, scale)
    return _attend(query, key, value, scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    eight = QUANTIZE_KV.run(key, value)
    return FP8_ATTENTION.run(query, *eight, key.shape[2], scale)


def problem(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why these cannot be attended in fp8, or None."""
    if query.ndim != 4 or query.shape[1] != key.shape[1]:
        return "query heads share key heads"
    if query.shape[3] not in HEAD_DIMS or value.shape[3] != query.shape[3]:
        return f"head_dim {query.shape[3]}, expected one of {HEAD_DIMS}"
    return unsupported(query.device.index or 0) if query.is_cuda else None


def missing(query: Tensor) -> str | None:
    """What has to be installed for its kernel, or None."""
    return cuda_problem(query.device, query.dtype) if query.is_cuda else None


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _allocate_eight(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    batch, heads, keys, dim = key.shape
    tiles = padded(keys) // ROWS
    return (
        _empty(key, batch, heads, tiles, ROWS * dim, dtype=torch.int8),
        _empty(key, batch, heads, tiles, ROWS * dim, dtype=DTYPE),
        _empty(key, batch, heads, tiles, 4),
    )


def _allocate_out(query: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (reference.empty_result(query),)


def _check_heads(op: str, **named: Tensor) -> None:
    for name, t in named.items():
        checks.tensor(op, name, t)
        if t.ndim != 4 or t.shape[3] not in HEAD_DIMS:
            raise ValueError(
                f"{op}: {name} has shape {list(t.shape)}, expected [batch, heads, tokens, dim] "
                f"with dim one of {HEAD_DIMS}"
            )
    heads = {name: tuple(t.shape[:2]) for name, t in named.items()}
    if len(set(heads.values())) > 1:
        raise ValueError(f"{op}: batch and heads differ: {heads}")


def _check_quantize(key: Tensor, value: Tensor) -> None:
    _check_heads("quantize_kv", key=key, value=value)


def _check_attention(
    query: Tensor,
    k8: Tensor,
    v8: Tensor,
    scales: Tensor,
    keys: int,
    scale: float,
) -> None:
    _check_heads("fp8_attention", query=query)
    shape = *query.shape[:2], padded(keys) // ROWS, ROWS * query.shape[3]
    for name, t in {"k8": k8, "v8": v8}.items():
        if tuple(t.shape) != shape or not t.is_contiguous():
            raise ValueError(
                f"fp8_attention: {name} has shape {list(t.shape)}, expected {list(shape)}, "
                "contiguous: take it from quantize_kv"
            )
    if keys < 1 or scale <= 0:
        raise ValueError(
            f"fp8_attention: keys is {keys} and scale {scale}, expected positive numbers"
        )


SIZED: Any = lambda inputs, rows, width, chain: {"key": inputs.normal(1, 1, rows, 128)}  # noqa: E731
SHARED: dict[str, Any] = {
    "cases": (),
    "sized": SIZED,
    "backends": ("torch", "cuda"),
    "prefer": ("cuda",),
    "internal": True,
    "category": "attention",
}

QUANTIZE_KV = Op(
    name="quantize_kv",
    schema="(Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)",
    formula="k8 · scales[0] is key less about its mean, v8 · scales[1] is valueᵀ",
    check=_check_quantize,
    allocate=_allocate_eight,
    reference=reference.quantize,
    kernels=FolderKernels(__name__, "plan_quantize"),
    outputs=("k8", "v8", "scales"),
    **SHARED,
)

FP8_ATTENTION = Op(
    name="fp8_attention",
    schema="(Tensor query, Tensor k8, Tensor v8, Tensor scales, int keys, float scale) -> Tensor",
    formula="softmax(query · scale · (k8 · scales[0])ᵀ) · (v8 · scales[1])ᵀ",
    check=_check_attention,
    allocate=_allocate_out,
    reference=reference.attention,
    kernels=FolderKernels(__name__, "plan_attention"),
    outputs=("out",),
    eight=("k8", "v8"),
    **SHARED,
)
