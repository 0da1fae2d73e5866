"""Rotary embedding of transformers, which names the function `rotary_pos_emb`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...ops.rope import apply_rope_qk


class RotaryPosEmb(nn.Module):
    """apply_rotary_pos_emb of Llama and its kin: heads before tokens, pairs half a head apart."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if cos.dtype != q.dtype or cos.shape[-1] != q.shape[-1]:
            # tables of another dtype promote the result; narrower tables rotate a part of the head
            return turned(q, cos, sin), turned(k, cos, sin)
        return apply_rope_qk(q, k, cos, sin, layout="half")


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-second half, first half) sin"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
