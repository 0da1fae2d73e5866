"""RoPE of the tokens that a language model decodes, and their keys and values written into its
cache, in one launch.

A step of attention, not a public op: it writes to the cache that it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..folder_kernels import FolderKernels
from ..op import Op
from ..rope.apply import check_tables
from . import cases, reference

NAME = "rope_into_cache"


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    eps: float,
    layout: str,
) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4 or t.shape[:2] != query.shape[:2]:
            raise ValueError(f"{NAME}: {name} is {list(t.shape)}, expected [B, T, heads, D]")
        if t.dtype != query.dtype:
            raise TypeError(f"{NAME}: {name} is {t.dtype}, query is {query.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{NAME}: key has rows of {key.shape[-1]}, query of {query.shape[-1]}")
    check_tables(NAME, "query", query, cos, sin, layout, query.shape[-1])
    check_tables(NAME, "key", key, cos, sin, layout, key.shape[-1])
    if (q_weight is None) != (k_weight is None):
        raise ValueError(f"{NAME}: one of q_weight and k_weight is None, the other is not")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        checks.vector(NAME, name, weight, query.shape[-1], "query")
    for name, cache, rows in (("keys", keys, key), ("values", values, value)):
        batch, tokens, heads, dim = rows.shape
        if cache.ndim != 4 or cache.shape[:2] != (batch, heads) or cache.shape[3] != dim:
            raise ValueError(
                f"{NAME}: {name} is {list(cache.shape)}, expected [{batch}, {heads}, room, {dim}]"
            )
        if cache.shape[2] != keys.shape[2] or cache.shape[2] < tokens:
            raise ValueError(
                f"{NAME}: {name} has room for {cache.shape[2]}, keys for {keys.shape[2]}, "
                f"{tokens} are written"
            )
        if cache.dtype != rows.dtype:
            raise TypeError(f"{NAME}: {name} is {cache.dtype}, its rows are {rows.dtype}")
    if length.ndim or length.dtype != torch.int64:
        raise ValueError(
            f"{NAME}: length is {list(length.shape)} {length.dtype}, expected [] int64"
        )


ROPE_INTO_CACHE = Op(
    name=NAME,
    schema="(Tensor query, Tensor key, Tensor value, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) length, "
    'float eps=1e-6, str layout="half") -> Tensor',
    formula="rope(rmsnorm(query) · q_weight); keys and values at length + t become those of "
    "token t, length += T",
    check=_check,
    allocate=lambda query, *_: (torch.empty_like(query),),
    reference=reference.rope_into_cache,
    exact=reference.CHAINS,
    kernels=FolderKernels(__name__),
    cases=cases.CASES,
    sized=cases.sized,
    prefer=("cuda",),
    backends=("torch", "cuda"),
    internal=True,
    integers=("length",),
    writes=("keys", "values", "length"),
)
