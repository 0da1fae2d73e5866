"""Ops that exist for torch.compile: results written into slices, and sums in one kernel.

torch.compile cannot express a kernel that writes into a slice of its output. So each of these is
one op of a compiled graph, which allocates the whole tensor and runs kernels on its slices; nothing
is left to concatenate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops import library
from ...ops.adaln import ADALN_LAYERNORM
from ...ops.gelu import GELU
from ...ops.qk_norm_rope import QK_NORM_ROPE
from ...ops.residual import GATED_RESIDUAL
from ...ops.rmsnorm import RMSNORM


def gelu_beside(left: Tensor, x: Tensor, tanh: bool, exact: str, backend: str) -> Tensor:
    """[left, gelu(x)]"""
    rows, width = _empty_columns(left, x), left.shape[-1]
    copy_rows(rows[..., :width], left)
    GELU(x, tanh, out=rows[..., width:], exact=exact or None, backend=backend or None)
    return rows


def _empty_columns(left: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], left.shape[-1] + x.shape[-1]))


def copy_rows(out: Tensor, x: Tensor) -> None:
    """Copy x into columns of wider rows, 16 bytes at a time where both are aligned: PyTorch's copy
    does not vectorise there."""
    bits = x.data_ptr() | out.data_ptr()
    for t in (x, out):
        for size in (t.shape[-1], *t.stride()[:-1]):
            bits |= size * t.element_size()
    if bits % 16 == 0 and x.stride(-1) == 1:
        x, out = x.view(torch.complex128), out.view(torch.complex128)
    out.copy_(x)


def concat_tokens(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat of token streams [batch, tokens, ...], which does not vectorise over columns of
    wider rows."""
    traced = torch.compiler.is_compiling()
    plain = all(type(t) is Tensor and t.dtype == parts[0].dtype for t in parts)
    if traced or not plain or (torch.is_grad_enabled() and any(t.requires_grad for t in parts)):
        return torch.cat(list(parts), dim=1)
    sizes = [t.shape[1] for t in parts]
    first = parts[0]
    tokens = first.new_empty((first.shape[0], sum(sizes), *first.shape[2:]))
    for out, part in zip(tokens.split(sizes, dim=1), parts, strict=True):
        copy_rows(out, part)
    return tokens


def concat_or_view(streams: Sequence[Tensor]) -> Tensor:
    """Two streams concatenated, to be read only: a view, if one follows the other in memory."""
    first, second = streams
    tokens, step = first.shape[1] + second.shape[1], first.stride(1)
    end = first.data_ptr() + first.shape[1] * step * first.element_size()
    if (
        second.data_ptr() != end
        or first.stride() != second.stride()
        or first.dtype != second.dtype
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or (first.shape[0] > 1 and first.stride(0) < tokens * step)
    ):
        return concat_tokens(streams)
    return first.as_strided((first.shape[0], tokens, first.shape[2]), first.stride())


def joint_norm(
    left: Tensor,
    right: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    bias: Tensor | None,
    eps: float,
    exact: str,
    backend: str,
) -> Tensor:
    """layernorm([left, right]) * (1 + scale) + shift, of two token streams."""
    operands = concat_or_view((left, right)), weight, scale, shift, bias, eps
    return ADALN_LAYERNORM.run(*operands, None, exact or None, backend or None, False)


def joint_residual(
    left: Tensor, right: Tensor, x: Tensor, gate: Tensor | None, exact: str, backend: str
) -> Tensor:
    """[left, right] + x * gate"""
    operands = concat_or_view((left, right)), x, gate
    return GATED_RESIDUAL.run(*operands, None, exact or None, backend or None, False)


def _empty_tokens(left: Tensor, right: Tensor, *_: object) -> Tensor:
    return left.new_empty((left.shape[0], left.shape[1] + right.shape[1], left.shape[2]))


def joint_qk(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    q_weights: Sequence[Tensor],
    k_weights: Sequence[Tensor],
    eps: Sequence[float],
    cos: Tensor | None,
    sin: Tensor | None,
    exact: str,
    backend: str,
    separate: bool,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate query and key of several streams [B, S, H, D], and concatenate them; the
    tables are [S of all streams, D]. `separate`: a launch for query, one for key, no tables."""
    query, key = _empty_query_key(queries, keys)
    sizes = [q.shape[1] for q in queries]
    outputs = zip(query.split_with_sizes(sizes, 1), key.split_with_sizes(sizes, 1), strict=True)
    how = exact or None, backend or None, False
    start = 0
    for i, (q_out, k_out) in enumerate(outputs):
        q, k, q_weight, k_weight = queries[i], keys[i], q_weights[i], k_weights[i]
        if separate:
            RMSNORM.run(q, q_weight, eps[i], q_out, *how)
            RMSNORM.run(k, k_weight, eps[i], k_out, *how)
        else:
            here = slice(start, start + sizes[i])
            tables = (None, None) if cos is None or sin is None else (cos[here], sin[here])
            operands = q, k, q_weight, k_weight, *tables, eps[i], False, "interleaved"
            QK_NORM_ROPE.run(*operands, (q_out, k_out), *how)
        start += sizes[i]
    return query, key


def _empty_query_key(
    queries: Sequence[Tensor], keys: Sequence[Tensor], *_: object
) -> tuple[Tensor, Tensor]:
    tokens = sum([q.shape[1] for q in queries])
    q, k = queries[0], keys[0]
    return (
        q.new_empty((q.shape[0], tokens, *q.shape[2:])),
        k.new_empty((k.shape[0], tokens, *k.shape[2:])),
    )


GELU_BESIDE = library.define_unrecorded(
    "gelu_beside",
    "(Tensor left, Tensor x, bool tanh, str exact, str backend) -> Tensor",
    gelu_beside,
    _empty_columns,
)
JOINT_QK = library.define_unrecorded(
    "joint_qk",
    "(Tensor[] queries, Tensor[] keys, Tensor[] q_weights, Tensor[] k_weights, float[] eps, "
    "Tensor? cos, Tensor? sin, str exact, str backend, bool separate) -> (Tensor, Tensor)",
    joint_qk,
    _empty_query_key,
)
JOINT_NORM = library.define_unrecorded(
    "joint_norm",
    "(Tensor left, Tensor right, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? bias, "
    "float eps, str exact, str backend) -> Tensor",
    joint_norm,
    _empty_tokens,
)
JOINT_RESIDUAL = library.define_unrecorded(
    "joint_residual",
    "(Tensor left, Tensor right, Tensor x, Tensor? gate, str exact, str backend) -> Tensor",
    joint_residual,
    _empty_tokens,
)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, in one kernel. Inductor recomputes a sum where its slices are read: the six parts of a
    modulation of LTX-Video's block in four kernels, which take longer to launch than to run."""
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return TOTAL(a, b)
    return a + b


TOTAL = library.define_unrecorded("total", "(Tensor a, Tensor b) -> Tensor", torch.add, torch.add)
