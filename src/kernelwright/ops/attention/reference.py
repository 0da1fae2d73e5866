"""Attention in plain PyTorch: the reference that the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# the most scores of which the reference is computed in float64, 2 GiB
MAX_SCORES = 1 << 28


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(query @ key^T * scale + mask) @ value, in the next wider dtype, rounded once.

    query [B, H, Sq, D], key [B, G, Sk, D], value [B, G, Sk, Dv] with H a multiple of G. A row whose
    keys are all masked out gives zeros, as PyTorch's SDPA does.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    work = torch.float32 if half else torch.float64
    group = query.shape[1] // max(key.shape[1], 1)
    q = query.to(work)
    k = key.to(work).repeat_interleave(group, dim=1)
    v = value.to(work).repeat_interleave(group, dim=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    scores = q @ k.transpose(-2, -1) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.to(work)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))

    # a softmax over nothing is 0/0; both the values and the gradients of such a row must be zero
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).to(query.dtype)


def part(arguments: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Cuts a call of more than MAX_SCORES scores to the first group of heads of the first batch."""
    query, key = arguments["query"], arguments["key"]
    scores = (*query.shape[:3], key.shape[2])
    if torch.Size(scores).numel() <= MAX_SCORES:
        return dict
    heads = query.shape[1] // key.shape[1]

    def cut(values: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(values)
        for name, value in values.items():
            if name in ("query", "out"):
                kept[name] = value[:1, :heads]
            elif name in ("key", "value"):
                kept[name] = value[:1, :1]
            elif name == "mask" and value is not None:
                kept[name] = torch.broadcast_to(value, scores)[:1, :heads]
        return kept

    return cut
