"""RoPE and the update of a static cache in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..qk_norm_rope import reference as with_norm
from ..rope import reference as without_norm

Part = Tensor | None


def write(keys: Tensor, values: Tensor, length: Tensor, key: Tensor, value: Tensor) -> None:
    """Write key and value [B, T, heads, D] at the positions after `length`, and add T to it."""
    tokens = key.shape[1]
    positions = torch.arange(tokens, device=length.device) + length
    keys.index_copy_(2, positions, key.transpose(1, 2))
    values.index_copy_(2, positions, value.transpose(1, 2))
    length.add_(tokens)


def _run(
    rope: Callable[..., Any],
    norm_rope: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Part,
    k_weight: Part,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    eps: float,
    layout: str,
) -> Tensor:
    if q_weight is None:
        query, key = rope(query, key, cos, sin, layout)
    else:
        query, key = norm_rope(query, key, q_weight, k_weight, cos, sin, eps, False, layout)
    write(keys, values, length, key, value)
    return query


rope_into_cache = partial(_run, without_norm.rope_qk, with_norm.qk_norm_rope)
CHAINS = {
    "transformers": partial(
        _run, without_norm.QK_CHAINS["transformers"], with_norm.CHAINS["transformers"]
    )
}
