"""Results written where they belong, so that nothing is left to concatenate.

torch.compile has no word for a kernel that writes a part of a tensor it made. So each of these is
an op of its own in a graph, which makes the whole tensor and runs the kernels on its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import library
from ...ops.gelu import GELU
from ...ops.qk_norm_rope import QK_NORM_ROPE
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
    places = zip(query.split(sizes, dim=1), key.split(sizes, dim=1), strict=True)
    how: dict[str, Any] = {"exact": exact or None, "backend": backend or None}
    start = 0
    for i, (q_out, k_out) in enumerate(places):
        q, k, q_weight, k_weight = queries[i], keys[i], q_weights[i], k_weights[i]
        if each:
            RMSNORM(q, q_weight, eps[i], out=q_out, **how)
            RMSNORM(k, k_weight, eps[i], out=k_out, **how)
        else:
            here = slice(start, start + sizes[i])
            tables = (None, None) if cos is None or sin is None else (cos[here], sin[here])
            operands = q, k, q_weight, k_weight, *tables, eps[i], False, "interleaved"
            QK_NORM_ROPE(*operands, out=(q_out, k_out), **how)
        start += sizes[i]
    return query, key


def _joint(queries: Sequence[Tensor], keys: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor]:
    tokens = sum(q.shape[1] for q in queries)
    q, k = (t[0].new_empty((t[0].shape[0], tokens, *t[0].shape[2:])) for t in (queries, keys))
    return q, k


GELU_BESIDE = library.define(
    "gelu_beside",
    "(Tensor left, Tensor x, bool tanh, str exact, str backend) -> Tensor",
    gelu_beside,
    _rows,
)
JOINT_QK = library.define(
    "joint_qk",
    "(Tensor[] queries, Tensor[] keys, Tensor[] q_weights, Tensor[] k_weights, float[] eps, "
    "Tensor? cos, Tensor? sin, str exact, str backend, bool each) -> (Tensor, Tensor)",
    joint_qk,
    _joint,
)
