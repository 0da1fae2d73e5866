"""Rotary embedding in plain PyTorch, and the eager chains its exact modes equal."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..row.reference import widen
from .tables import over_rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x cos + turned(x) sin"""
    cos, sin = (full_width(over_rows(t, x), x.shape[-1], layout) for t in (cos, sin))
    return x * cos + turned(x, layout) * sin


def turned(x: Tensor, layout: str) -> Tensor:
    """(-b, a) for every pair (a, b): neighbours, or elements half a row apart."""
    if layout == "interleaved":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), -1).reshape(x.shape)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), -1)


def turned_rows(x: Tensor, cos: Tensor, across_heads: bool) -> Tensor:
    """x reshaped so that the table rotates over its last dimension: a head, or with a table
    as wide as the token (LTX) all its heads."""
    if not across_heads or x.ndim != 4 or cos.ndim == 4:
        return x
    width = x.shape[2] * x.shape[3]
    return x.reshape(*x.shape[:2], width) if cos.shape[-1] in (width, width // 2) else x


def full_width(table: Tensor, width: int, layout: str) -> Tensor:
    """A table of D or D/2 columns as D columns; pairs of a half-width table share a column."""
    if table.shape[-1] == width:
        return table
    if layout == "interleaved":
        return table.repeat_interleave(2, dim=-1)
    return torch.cat((table, table), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    return rotate(widen(x), cos, sin, layout).to(x.dtype)


def rope_qk(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    return apply_rope(query, cos, sin, layout), apply_rope(key, cos, sin, layout)


def eager_rope(chain: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """diffusers (LTX, FLUX) rotates in float32; transformers (Llama) in the dtype of x and tables;
    wan as transformers, its result cast back to the dtype of x."""
    if chain == "diffusers":
        return rotate(x.float(), cos, sin, layout).to(x.dtype)
    out = rotate(x, cos, sin, layout)
    return out.type_as(x) if chain == "wan" else out


def _qk(
    chain: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    return eager_rope(chain, query, cos, sin, layout), eager_rope(chain, key, cos, sin, layout)


CHAINS = ("diffusers", "transformers", "wan")
APPLY_CHAINS = {c: partial(eager_rope, c) for c in CHAINS}
QK_CHAINS = {c: partial(_qk, c) for c in CHAINS}
