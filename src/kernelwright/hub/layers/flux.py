"""The blocks of FLUX.1: gate, residual, norm and modulation in one launch, QK-norm and RoPE too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.linear import linear_gelu
from ...ops.qk_norm_rope import qk_norm_rope
from .gated import hooked
from .ltx import Rotary, alike, gated, gated_norm_modulate
from .norms import plain

Arguments = dict[str, Any] | None


class FluxTransformerBlock(nn.Module):
    """diffusers' FluxTransformerBlock: text and image apart, joint in attention."""

    can_torch_compile = True
    has_backward = True

    norm1: Any
    norm1_context: Any
    attn: Any
    norm2: Any
    norm2_context: Any
    ff: Any
    ff_context: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        joint_attention_kwargs: Arguments = None,
    ) -> tuple[Tensor, Tensor]:
        rows, *image = self.norm1(hidden_states, emb=temb)
        text_rows, *text = self.norm1_context(encoder_hidden_states, emb=temb)
        attended, text_attended, *added = self.attn(
            hidden_states=rows,
            encoder_hidden_states=text_rows,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        hidden_states = branch(self.norm2, self.ff, hidden_states, attended, image)
        if added:  # by an IP-Adapter
            hidden_states = hidden_states + added[0]
        encoder_hidden_states = branch(
            self.norm2_context, self.ff_context, encoder_hidden_states, text_attended, text
        )
        return clipped(encoder_hidden_states), hidden_states


class FluxSingleTransformerBlock(nn.Module):
    """diffusers' FluxSingleTransformerBlock: text and image as one row of tokens."""

    can_torch_compile = True
    has_backward = True

    norm: Any
    attn: Any
    proj_mlp: Any
    act_mlp: Any
    proj_out: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        joint_attention_kwargs: Arguments = None,
    ) -> tuple[Tensor, Tensor]:
        text_tokens = encoder_hidden_states.shape[1]
        tokens = torch.cat((encoder_hidden_states, hidden_states), dim=1)
        rows, gate = self.norm(tokens, emb=temb)
        activated = linear_activated(self.proj_mlp, self.act_mlp, rows)
        attended = self.attn(
            hidden_states=rows, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
        )
        out = self.proj_out(torch.cat((attended, activated), dim=2))
        tokens = clipped(gated(tokens, out, gate[:, None]))
        return tokens[:, :text_tokens], tokens[:, text_tokens:]


class FluxAttention(nn.Module):
    """diffusers' FluxAttention, with the norm and RoPE of query and key in one launch."""

    can_torch_compile = True
    has_backward = True

    processor: Any
    head_dim: int
    added_kv_proj_dim: int | None
    to_q: Any
    to_k: Any
    to_v: Any
    to_out: Any
    norm_q: Any
    norm_k: Any
    add_q_proj: Any
    add_k_proj: Any
    add_v_proj: Any
    to_add_out: Any
    norm_added_q: Any
    norm_added_k: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> Any:
        text = encoder_hidden_states
        processor = self.processor
        joint = self.added_kv_proj_dim is not None
        norms = [plain(n, hidden_states) for n in (self.norm_q, self.norm_k)]
        if joint and text is not None:
            norms += [plain(n, text) for n in (self.norm_added_q, self.norm_added_k)]
        if (
            kwargs
            or type(processor).__name__ != "FluxAttnProcessor"
            or getattr(self, "fused_projections", False)
            or joint != (text is not None)
            or not all(alike(norms[0], other) for other in norms)
        ):
            own = type(self).forward
            return own(self, hidden_states, text, attention_mask, image_rotary_emb, **kwargs)
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        streams = [(hidden_states, self.to_q, self.to_k, self.to_v, *norms[:2])]
        if text is not None:
            added = self.add_q_proj, self.add_k_proj, self.add_v_proj
            streams.insert(0, (text, *added, *norms[2:]))
        parts = []
        start = 0
        for x, to_q, to_k, to_v, norm_q, norm_k in streams:
            assert norm_q is not None
            assert norm_k is not None
            end = start + x.shape[1]
            cos, sin = (None, None) if image_rotary_emb is None else image_rotary_emb
            if cos is not None and sin is not None:
                cos, sin = (t[start:end].to(x.device) for t in (cos, sin))
            q, k, v = (to(x).unflatten(-1, (-1, self.head_dim)) for to in (to_q, to_k, to_v))
            parts.append((*qk_norm_rope(q, k, norm_q[1], norm_k[1], cos, sin, norm_q[3]), v))
            start = end
        query, key, value = (
            t[0] if len(t) == 1 else torch.cat(t, dim=1) for t in zip(*parts, strict=True)
        )
        rows = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        rows = rows.flatten(2, 3).to(query.dtype)
        if text is None:
            return rows
        text_tokens = text.shape[1]
        image = rows[:, text_tokens:].contiguous()
        for layer in self.to_out:
            image = layer(image)
        return image, self.to_add_out(rows[:, :text_tokens].contiguous())


def branch(norm: Any, ff: Any, residual: Tensor, x: Tensor, parts: list[Tensor]) -> Tensor:
    """s = residual + gate * x;  s + last gate * ff(norm(s) * (1 + scale) + shift)"""
    gate, shift, scale, last = (t[:, None] for t in parts)
    rows, residual = gated_norm_modulate(norm, residual, x, gate, scale, shift)
    return gated(residual, ff(rows), last)


def linear_activated(linear: Any, activation: Any, x: Tensor) -> Tensor:
    """activation(linear(x)), GELU in the epilogue of the GEMM"""
    # an adapter around the Linear, or a hook, has to run
    bare = type(linear) is nn.Linear and type(activation) is nn.GELU
    if not bare or hooked(linear) or hooked(activation):
        return activation(linear(x))
    tanh = activation.approximate == "tanh"
    return linear_gelu(x, linear.weight, linear.bias, approximate=tanh)


def clipped(x: Tensor) -> Tensor:
    """x clipped to the range of float16, as eager does in float16."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x
