"""The adaptive norms of diffusers: a norm modulated by a projection of the timestep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.adaln import adaln_layernorm, adaln_rmsnorm
from .norms import plain


class AdaLayerNorm(nn.Module):
    """norm(x) * (1 + scale) + shift; scale and shift are the halves of a projection."""

    can_torch_compile = True
    has_backward = True

    chunk_dim: int
    emb: Any
    linear: Any
    silu: Any
    norm: Any

    def forward(
        self, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None
    ) -> Tensor:
        if self.emb is not None:
            temb = self.emb(timestep)
        made = self.linear(self.silu(temb))
        if self.chunk_dim == 1:
            shift, scale = (part[:, None] for part in made.chunk(2, dim=1))
        else:
            scale, shift = made.chunk(2, dim=0)
        return norm_modulate(self.norm, x, scale, shift)


class AdaLayerNormZero(nn.Module):
    """A modulated norm; also returns the gates and modulation of the rest of the block."""

    can_torch_compile = True
    has_backward = True

    emb: Any
    linear: Any
    silu: Any
    norm: Any

    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *rest = self.linear(self.silu(emb)).chunk(6, dim=1)
        return norm_modulate(self.norm, x, scale[:, None], shift[:, None]), *rest


class AdaLayerNormZeroSingle(nn.Module):
    """A modulated norm; also returns one gate."""

    can_torch_compile = True
    has_backward = True

    linear: Any
    silu: Any
    norm: Any

    def forward(self, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return norm_modulate(self.norm, x, scale[:, None], shift[:, None]), gate


class AdaLayerNormContinuous(nn.Module):
    """norm(x) * (1 + scale) + shift, both projected from a conditioning embedding."""

    can_torch_compile = True
    has_backward = True

    linear: Any
    silu: Any
    norm: Any

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        made = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = made.chunk(2, dim=1)
        return norm_modulate(self.norm, x, scale[:, None], shift[:, None])


class SD35AdaLayerNormZeroX(nn.Module):
    """AdaLayerNormZero with a second modulation of the same norm."""

    can_torch_compile = True
    has_backward = True

    linear: Any
    silu: Any
    norm: Any

    def forward(self, hidden_states: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
        parts = self.linear(self.silu(emb)).chunk(9, dim=1)
        shift, scale, *rest, shift_2, scale_2, gate_2 = parts
        first, second = (
            norm_modulate(self.norm, hidden_states, a[:, None], b[:, None])
            for a, b in ((scale, shift), (scale_2, shift_2))
        )
        return first, *rest, second, gate_2


def norm_modulate(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """norm(x) * (1 + scale) + shift, fused where `plain` knows the norm."""
    parts = plain(norm, x, scale, shift)
    if parts is None or scale.ndim not in (x.ndim, 1):
        return norm(x) * (1 + scale) + shift
    kind, weight, bias, eps = parts
    if kind == "rms":
        return adaln_rmsnorm(x, weight, scale, shift, eps)
    return adaln_layernorm(x, weight, scale, shift, bias, eps)
