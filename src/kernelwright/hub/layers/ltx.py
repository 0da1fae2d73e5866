"""A block of LTX-Video: norms, modulation, gates and residuals in three launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.qk_norm_rope import qk_norm_rope
from ...ops.residual import gated_residual, gated_residual_norm
from .adaptive import norm_modulate
from .norms import plain

Rotary = tuple[Tensor, Tensor]


class LTXVideoTransformerBlock(nn.Module):
    """diffusers' LTXVideoTransformerBlock."""

    can_torch_compile = True
    has_backward = True

    scale_shift_table: Tensor
    norm1: Any
    norm2: Any
    attn1: Any
    attn2: Any
    ff: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        table = self.scale_shift_table.to(temb.device)
        parts = table + temb.reshape(temb.shape[0], temb.shape[1], table.shape[0], -1)
        shift, scale, gate, shift_ff, scale_ff, gate_ff = parts.unbind(2)

        rows = norm_modulate(self.norm1, hidden_states, scale, shift)
        turned = self.attn1(
            hidden_states=rows, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
        )
        hidden_states = gated(hidden_states, turned, gate)
        crossed = self.attn2(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            image_rotary_emb=None,
            attention_mask=encoder_attention_mask,
        )
        rows, hidden_states = gated_norm_modulate(
            self.norm2, hidden_states, crossed, None, scale_ff, shift_ff
        )
        return gated(hidden_states, self.ff(rows), gate_ff)


class LTXAttention(nn.Module):
    """diffusers' LTXAttention, with the norm and RoPE of query and key in one launch."""

    can_torch_compile = True
    has_backward = True

    processor: Any
    heads: int
    to_q: Any
    to_k: Any
    to_v: Any
    to_out: Any
    norm_q: Any
    norm_k: Any
    prepare_attention_mask: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q_norm, k_norm = plain(self.norm_q, hidden_states), plain(self.norm_k, context)
        processor = self.processor
        if (
            kwargs
            or type(processor).__name__ != "LTXVideoAttnProcessor"
            or getattr(self, "fused_projections", False)
            or not alike(q_norm, k_norm)
        ):
            return type(self).forward(
                self,
                hidden_states,
                encoder_hidden_states,
                attention_mask,
                image_rotary_emb,
                **kwargs,
            )
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        assert q_norm is not None
        assert k_norm is not None
        if attention_mask is not None:
            batch, tokens = context.shape[:2]
            attention_mask = self.prepare_attention_mask(attention_mask, tokens, batch)
            attention_mask = attention_mask.view(batch, self.heads, -1, attention_mask.shape[-1])
        cos, sin = (None, None) if image_rotary_emb is None else image_rotary_emb
        query, key = qk_norm_rope(
            self.to_q(hidden_states),
            self.to_k(context),
            q_norm[1],
            k_norm[1],
            cos,
            sin,
            q_norm[3],
            across_heads=True,
        )
        value = self.to_v(context)
        query, key, value = (t.unflatten(2, (self.heads, -1)) for t in (query, key, value))
        rows = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        rows = rows.flatten(2, 3).to(query.dtype)
        for layer in self.to_out:
            rows = layer(rows)
        return rows


def alike(q: Any, k: Any) -> bool:
    """Whether the RMSNorms of query and key differ in their weights only."""
    if q is None or k is None:
        return False
    same = q[0] == k[0] == "rms" and q[3] == k[3]
    return same and (q[1] is None) == (k[1] is None)


def gated_norm_modulate(
    norm: Any, residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """s = residual + gate * x;  norm(s) * (1 + scale) + shift, and s"""
    known = plain(norm, residual, x, scale, shift)
    if known is None or (gate is not None and gate.dtype != x.dtype):
        total = residual + x if gate is None else gated(residual, x, gate)
        return norm_modulate(norm, total, scale, shift), total
    kind, weight, bias, eps = known
    return gated_residual_norm(residual, x, gate, weight, bias, scale, shift, kind, eps)


def gated(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """residual + gate * x"""
    if not residual.dtype == x.dtype == gate.dtype:
        return residual + x * gate
    return gated_residual(residual, x, gate)
