"""QK-norm and RoPE in plain PyTorch, and the eager chains the exact modes equal."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..rope.reference import eager_rope, rotate, turned_rows
from ..row.reference import affine, eager_norm, normalize, widen

Part = Tensor | None


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Part,
    k_weight: Part,
    cos: Part,
    sin: Part,
    eps: float,
    across_heads: bool,
    layout: str,
) -> tuple[Tensor, Tensor]:
    def one(x: Tensor, weight: Part) -> Tensor:
        row = x.flatten(2) if across_heads else x
        y = affine(normalize(widen(row), "rms", eps), weight).reshape(x.shape)
        if cos is not None and sin is not None:
            y = rotate(turned_rows(y, cos, across_heads), cos, sin, layout).reshape(x.shape)
        return y.to(x.dtype)

    return one(query, q_weight), one(key, k_weight)


def _chain(
    norm: str,
    rope: str,
    query: Tensor,
    key: Tensor,
    q_weight: Part,
    k_weight: Part,
    cos: Part,
    sin: Part,
    eps: float,
    across_heads: bool,
    layout: str,
) -> tuple[Tensor, Tensor]:
    def one(x: Tensor, weight: Part) -> Tensor:
        row = x.flatten(2) if across_heads else x
        y = eager_norm(row, norm, "rms", weight, None, eps).reshape(x.shape)
        if cos is None or sin is None:
            return y
        return eager_rope(rope, turned_rows(y, cos, across_heads), cos, sin, layout).reshape(
            x.shape
        )

    return one(query, q_weight), one(key, k_weight)


CHAINS: dict[str, Any] = {
    "diffusers": partial(_chain, "torch", "diffusers"),
    "transformers": partial(_chain, "transformers", "transformers"),
}
