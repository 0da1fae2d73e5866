"""Attention in eight bits: scales finer than a tensor, results in 16 bits.

Values and probabilities are fp8 (e4m3). Query and key are int8: tensor cores multiply both at one
rate, and with a scale for each row int8 has a third of fp8's error, 0.9% against 2.6%, unless a row
has an outlier. The whole is off by 3.9% on Gaussian inputs (with query and key in fp8 by 5.1%).

Three steps, not public ops: `MEAN` reads some keys; `QUANTIZE_QKV` writes query, key and value in
eight bits, key and value in tiles that are copied to shared memory as they are; `FP8_ATTENTION`
attends. None has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.cuda import problem as cuda_problem
from .. import checks
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
    eight = QUANTIZE_QKV.run(query, key, value, MEAN.run(key), scale)
    return FP8_ATTENTION.run(*eight, query, key.shape[2])


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


def _allocate_mean(key: Tensor) -> tuple[Tensor, ...]:
    batch, heads, _, dim = key.shape
    return (_empty(key, batch, heads, dim),)


def _allocate_eight(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, queries, dim = query.shape
    rows, tiles = padded(queries), padded(key.shape[2]) // ROWS
    return (
        _empty(query, batch, heads, rows, dim, dtype=torch.int8),
        _empty(query, batch, heads, tiles, ROWS * dim, dtype=torch.int8),
        _empty(query, batch, heads, tiles, ROWS * dim, dtype=DTYPE),
        _empty(query, batch, heads, rows),
        _empty(query, batch, heads, tiles),
        _empty(query, batch, heads, tiles),
    )


def _allocate_out(q8: Tensor, k8: Tensor, v8: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """[B, H, Sq, D] with the heads of a token together, so that models merge them without a
    copy."""
    query = rest[3]
    batch, heads, queries = query.shape[:3]
    out = query.new_empty(batch, queries, heads, q8.shape[3])
    return (out.transpose(1, 2),)


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


def _check_mean(key: Tensor) -> None:
    _check_heads("attention_mean", key=key)


def _check_quantize(query: Tensor, key: Tensor, value: Tensor, mean: Tensor, scale: float) -> None:
    _check_heads("quantize_qkv", query=query, key=key, value=value)
    if scale <= 0:
        raise ValueError(f"quantize_qkv: scale is {scale}, expected a positive number")


def _check_attention(q8: Tensor, k8: Tensor, v8: Tensor, *rest: Any) -> None:
    for name, t in {"q8": q8, "k8": k8, "v8": v8}.items():
        if t.ndim != 4 or not t.is_contiguous():
            raise ValueError(f"fp8_attention: {name} is not contiguous, take it from quantize_qkv")
    keys = rest[-1]
    if not 0 < keys <= k8.shape[2] * ROWS:
        raise ValueError(f"fp8_attention: keys is {keys}, k8 has {k8.shape[2]} tiles of {ROWS}")


SIZED: Any = lambda inputs, rows, width, chain: {"key": inputs.normal(1, 1, rows, 128)}  # noqa: E731
SHARED: dict[str, Any] = {
    "cases": (),
    "sized": SIZED,
    "backends": ("torch", "triton"),
    "prefer": ("triton",),
    "internal": True,
    "category": "attention",
}

MEAN = Op(
    name="attention_mean",
    schema="(Tensor key) -> Tensor",
    formula="mean of some keys",
    check=_check_mean,
    allocate=_allocate_mean,
    reference=reference.mean,
    kernels=FolderKernels(__name__, "plan_mean"),
    outputs=("mean",),
    **SHARED,
)

QUANTIZE_QKV = Op(
    name="quantize_qkv",
    schema="(Tensor query, Tensor key, Tensor value, Tensor mean, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    formula="q · s is query · scale · log2(e), k · t is key - mean, v · u is valueᵀ",
    check=_check_quantize,
    allocate=_allocate_eight,
    reference=reference.quantize,
    kernels=FolderKernels(__name__, "plan_quantize"),
    outputs=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale"),
    **SHARED,
)

FP8_ATTENTION = Op(
    name="fp8_attention",
    schema="(Tensor q8, Tensor k8, Tensor v8, Tensor q_scale, Tensor k_scale, Tensor v_scale, "
    "Tensor query, int keys) -> Tensor",
    formula="softmax((q8 · q_scale) · (k8 · k_scale)ᵀ) · (v8 · v_scale)ᵀ",
    check=_check_attention,
    allocate=_allocate_out,
    reference=reference.attention,
    kernels=FolderKernels(__name__, "plan_attention"),
    outputs=("out",),
    eight=("q8", "k8", "v8"),
    **(SHARED | {"backends": ("torch", "cuda"), "prefer": ("cuda",)}),
)
