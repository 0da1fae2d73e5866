"""Attention in eight bits: scales finer than a tensor, results in 16 bits.

Values and probabilities are fp8 (e4m3). Query and key are int8 or fp8: tensor cores multiply both
at one rate, and with a scale for each row int8 has a third of the error, 0.9% against 2.6%, unless
a row has an outlier. With fp8 the whole is off by 5.1% on Gaussian inputs, with int8 by 3.8%.

Three steps, not public ops: `STATISTICS` reads keys and values once, for the mean of the keys and
the largest value of each channel; `QUANTIZE_QKV` writes query, key and value in fp8, value
transposed as fp8 tensor cores of Hopper need it; `FP8_ATTENTION` attends. None has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..folder_kernels import FolderKernels
from ..fp8 import unsupported
from ..fp8.reference import DTYPE
from ..op import Op
from . import reference
from .reference import CHUNK, ROWS, padded

HEAD_DIMS = (64, 128)


def fp8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    integers: bool = True,
    *,
    backend: str | None = None,
) -> Tensor:
    """softmax(query @ key^T * scale) @ value with operands and probabilities in eight bits:
    [B, H, Sq, D], [B, H, Sk, D], [B, H, Sk, E] -> [B, H, Sq, E]. Query and key are int8, or fp8
    without `integers`.

    >>> x = torch.ones(1, 1, 2, 64, dtype=torch.bfloat16)
    >>> fp8_attention(x, x, x).flatten()[:2]
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    sums, largest = STATISTICS.run(key, value, backend=backend)
    eight = QUANTIZE_QKV.run(query, key, value, sums, largest, scale, integers, backend=backend)
    return FP8_ATTENTION.run(*eight, query, key.shape[2], backend=backend)


def problem(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why these cannot be attended in fp8, or None."""
    if query.ndim != 4 or query.shape[1] != key.shape[1]:
        return "query heads share key heads"
    if query.shape[3] not in HEAD_DIMS or value.shape[3] != query.shape[3]:
        return f"head_dim {query.shape[3]}, expected one of {HEAD_DIMS}"
    if query.is_cuda:
        return unsupported(query.device.index or 0)
    return None


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _allocate_statistics(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    batch, heads, keys, dim = key.shape
    chunks = -(-keys // CHUNK)
    return (
        _empty(key, batch, heads, chunks, dim),
        _empty(key, batch, heads, chunks, value.shape[3]),
    )


def _allocate_eight(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, queries, dim = query.shape
    kind = torch.int8 if rest[-1] else DTYPE
    rows, keys, width = padded(queries), padded(key.shape[2]), value.shape[3]
    return (
        _empty(query, batch, heads, rows, dim, dtype=kind),
        _empty(query, batch, heads, keys, dim, dtype=kind),
        _empty(query, batch, heads, width, keys, dtype=DTYPE),
        _empty(query, batch, heads, rows),
        _empty(query, batch, heads, keys // ROWS),
        _empty(query, batch, heads, width),
    )


def _allocate_out(q8: Tensor, k8: Tensor, v8: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """[B, H, Sq, E] with the heads of a token together, so that models merge them without a
    copy."""
    query = rest[3]
    batch, heads, queries = query.shape[:3]
    out = query.new_empty(batch, queries, heads, v8.shape[2])
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


def _check_statistics(key: Tensor, value: Tensor) -> None:
    _check_heads("attention_statistics", key=key, value=value)


def _check_quantize(
    query: Tensor, key: Tensor, value: Tensor, sums: Tensor, largest: Tensor, scale: float, _: bool
) -> None:
    _check_heads("quantize_qkv", query=query, key=key, value=value)
    if scale <= 0:
        raise ValueError(f"quantize_qkv: scale is {scale}, expected a positive number")


def _check_attention(q8: Tensor, k8: Tensor, v8: Tensor, *rest: Any) -> None:
    for name, t in {"q8": q8, "k8": k8, "v8": v8}.items():
        if t.ndim != 4 or not t.is_contiguous():
            raise ValueError(f"fp8_attention: {name} is not contiguous, take it from quantize_qkv")
    keys = rest[-1]
    if not 0 < keys <= k8.shape[2]:
        raise ValueError(f"fp8_attention: keys is {keys}, k8 has {k8.shape[2]} rows")


SIZED: Any = lambda inputs, rows, width, chain: {"key": inputs.normal(1, 1, rows, 128)}  # noqa: E731
SHARED: dict[str, Any] = {
    "cases": (),
    "sized": SIZED,
    "backends": ("torch", "triton"),
    "prefer": ("triton",),
    "internal": True,
    "category": "attention",
}

STATISTICS = Op(
    name="attention_statistics",
    schema="(Tensor key, Tensor value) -> (Tensor, Tensor)",
    formula="of each chunk of keys: Σ key, max |value|",
    check=_check_statistics,
    allocate=_allocate_statistics,
    reference=reference.statistics,
    kernels=FolderKernels(__name__, "plan_statistics"),
    outputs=("sums", "largest"),
    **SHARED,
)

QUANTIZE_QKV = Op(
    name="quantize_qkv",
    schema="(Tensor query, Tensor key, Tensor value, Tensor sums, Tensor largest, float scale, "
    "bool integers) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    formula="q · s is query · scale · log2(e), k · t is key - mean(key), v · u is valueᵀ",
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
    **SHARED,
)
