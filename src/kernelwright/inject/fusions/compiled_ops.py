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
    rows, width = _rows(left, x), left.shape[-1]
    copy(rows[..., :width], left)
    GELU(x, tanh, out=rows[..., width:], exact=exact or None, backend=backend or None)
    return rows


def _rows(left: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], left.shape[-1] + x.shape[-1]))


def copy(out: Tensor, x: Tensor) -> None:
    """x into a part of wider rows, by 16 bytes where both allow it: PyTorch copies element by
    element there."""
    bits = x.data_ptr() | out.data_ptr()
    for t in (x, out):
        for size in (t.shape[-1], *t.stride()[:-1]):
            bits |= size * t.element_size()
    if bits % 16 == 0 and x.stride(-1) == 1:
        x, out = x.view(torch.complex128), out.view(torch.complex128)
    out.copy_(x)


def joint(parts: Sequence[Tensor]) -> Tensor:
    """Streams of tokens [batch, tokens, ...] one behind the other, as torch.cat puts them, which
    reads element by element what is a part of wider rows."""
    traced = torch.compiler.is_compiling()
    plain = all(type(t) is Tensor and t.dtype == parts[0].dtype for t in parts)
    if traced or not plain or (torch.is_grad_enabled() and any(t.requires_grad for t in parts)):
        return torch.cat(list(parts), dim=1)
    sizes = [t.shape[1] for t in parts]
    first = parts[0]
    whole = first.new_empty((first.shape[0], sum(sizes), *first.shape[2:]))
    for place, part in zip(whole.split(sizes, dim=1), parts, strict=True):
        copy(place, part)
    return whole


def whole(streams: Sequence[Tensor]) -> Tensor:
    """The same of two streams, to be read only: where they lie, if one lies behind the other."""
    first, second = streams
    tokens, step = first.shape[1] + second.shape[1], first.stride(1)
    behind = first.data_ptr() + first.shape[1] * step * first.element_size()
    if (
        second.data_ptr() != behind
        or first.stride() != second.stride()
        or first.dtype != second.dtype
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or (first.shape[0] > 1 and first.stride(0) < tokens * step)
    ):
        return joint(streams)
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
    """layernorm * (1 + scale) + shift of two streams, one behind the other."""
    operands = whole((left, right)), weight, scale, shift, bias, eps
    return ADALN_LAYERNORM.run(*operands, None, exact or None, backend or None, False)


def joint_residual(
    left: Tensor, right: Tensor, x: Tensor, gate: Tensor | None, exact: str, backend: str
) -> Tensor:
    """[left, right] + x * gate"""
    operands = whole((left, right)), x, gate
    return GATED_RESIDUAL.run(*operands, None, exact or None, backend or None, False)


def _both(left: Tensor, right: Tensor, *_: object) -> Tensor:
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
    each: bool,
) -> tuple[Tensor, Tensor]:
    """Query and key of several streams [batch, tokens, heads, dim], one behind the other: normed,
    and turned by tables [tokens of all, dim]. `each`: one launch for each norm."""
    query, key = _joint(queries, keys)
    sizes = [q.shape[1] for q in queries]
    places = zip(query.split_with_sizes(sizes, 1), key.split_with_sizes(sizes, 1), strict=True)
    how = exact or None, backend or None, False
    start = 0
    for i, (q_out, k_out) in enumerate(places):
        q, k, q_weight, k_weight = queries[i], keys[i], q_weights[i], k_weights[i]
        if each:
            RMSNORM.run(q, q_weight, eps[i], q_out, *how)
            RMSNORM.run(k, k_weight, eps[i], k_out, *how)
        else:
            here = slice(start, start + sizes[i])
            tables = (None, None) if cos is None or sin is None else (cos[here], sin[here])
            operands = q, k, q_weight, k_weight, *tables, eps[i], False, "interleaved"
            QK_NORM_ROPE.run(*operands, (q_out, k_out), *how)
        start += sizes[i]
    return query, key


def _joint(queries: Sequence[Tensor], keys: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor]:
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
    _rows,
)
JOINT_QK = library.define_unrecorded(
    "joint_qk",
    "(Tensor[] queries, Tensor[] keys, Tensor[] q_weights, Tensor[] k_weights, float[] eps, "
    "Tensor? cos, Tensor? sin, str exact, str backend, bool each) -> (Tensor, Tensor)",
    joint_qk,
    _joint,
)
JOINT_NORM = library.define_unrecorded(
    "joint_norm",
    "(Tensor left, Tensor right, Tensor? weight, Tensor? scale, Tensor? shift, Tensor? bias, "
    "float eps, str exact, str backend) -> Tensor",
    joint_norm,
    _both,
)
JOINT_RESIDUAL = library.define_unrecorded(
    "joint_residual",
    "(Tensor left, Tensor right, Tensor x, Tensor? gate, str exact, str backend) -> Tensor",
    joint_residual,
    _both,
)


def total(a: Tensor, b: Tensor) -> Tensor:
    """a + b, in one kernel. Inductor recomputes each part of a sum where it is read: the six parts
    of a modulation in LTX-Video's block in four kernels, which take longer to launch than to run.
    """
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return TOTAL(a, b)
    return a + b


TOTAL = library.define_unrecorded("total", "(Tensor a, Tensor b) -> Tensor", torch.add, torch.add)
