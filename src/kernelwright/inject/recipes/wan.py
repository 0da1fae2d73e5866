"""Wan 2.1 and 2.2.

A block computes each of its steps in float32 and rounds after it: norm with modulation, gate with
addition. Its attention normalises query and key over all heads, then rotates each head. Each of
these becomes one kernel, and the last addition of a block runs together with the first norm of the
next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...library_internals import processor_choices
from ..fusions import QKV, Fusions
from ..fusions.compiled_ops import add
from ..fusions.projections import run_in_order
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe, argument, class_of

MODULE = "diffusers.models.transformers.transformer_wan"
TEXT_TOKENS = 512  # the context is an image, if there is one, then this many tokens of text
Rotary = tuple[Tensor, Tensor]


def block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Rotary,
    ) -> Tensor:
        if hidden_states.dtype == torch.float64:  # some steps are then wider than float32
            return NotImplemented
        ahead = work_ahead.take(self, hidden_states, temb)
        if ahead is None:
            parts = modulation(self, temb)
            rows = fuse.norm_modulate(self.norm1, hidden_states, parts[1], parts[0], float32=True)
        else:
            parts, rows = ahead
        _, _, gate, shift_ff, scale_ff, gate_ff = parts

        attended = self.attn1(rows, None, None, rotary_emb)
        rows, hidden_states = fuse.residual_norm(
            hidden_states, attended, self.norm2, gate, float32=True
        )
        cross_attended = self.attn2(rows, encoder_hidden_states, None, None)
        rows, hidden_states = fuse.residual_norm(
            hidden_states, cross_attended, self.norm3, scale=scale_ff, shift=shift_ff, float32=True
        )
        branch = self.ffn(rows)

        # a modulation per token takes 12 times the memory of the rows: hold one block's at a time,
        # where it is not left to programs
        after = work_ahead.following(self) if temb.ndim == 3 else None
        if after is None:
            return fuse.residual(hidden_states, branch, gate_ff, float32=True)
        parts = modulation(after, temb)
        rows, hidden_states = fuse.residual_norm(
            hidden_states, branch, after.norm1, gate_ff, parts[1], parts[0], float32=True
        )
        work_ahead.offer(after, (hidden_states, temb), (parts, rows))
        return hidden_states

    return forward


def modulated_by_token(args: Any, kwargs: Any) -> bool:
    """Whether each token has a timestep of its own (Wan 2.2 5B). A program adds the table of the
    block to a token's embedding where it needs the sum; the recipe would store all sums."""
    temb = argument(args, kwargs, 2, "temb")
    return temb is not None and temb.ndim == 4


def modulation(block: Any, temb: Tensor) -> tuple[Tensor, ...]:
    """shift, scale and gate of both branches in float32: [batch, 1 or tokens, width] each."""
    table = block.scale_shift_table
    if table.dtype != torch.float32:  # otherwise the sum is promoted to float32
        temb = temb.float()
    if temb.ndim == 3:
        temb = temb.unsqueeze(1)
    table = table.unsqueeze(0)
    return (add(table, temb) if temb.shape[1] == 1 else table + temb).unbind(2)


def attention(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if kwargs or attention_mask is not None or not is_plain(self, encoder_hidden_states):
            return NotImplemented
        return attend(fuse, self, hidden_states, encoder_hidden_states, rotary_emb)

    return forward


def is_plain(attn: Any, context: Tensor | None) -> bool:
    """Whether it has the processor this recipe was written for, with separate projections, and no
    context parallelism where there is a context."""
    return (
        type(attn.processor) is class_of(f"{MODULE}.WanAttnProcessor")
        and not attn.fused_projections
        and (context is None or processor_choices(attn.processor)[1] is None)
    )


def attend(
    fuse: Fusions,
    attn: Any,
    hidden_states: Tensor,
    context: Tensor | None,
    rotary: Rotary | None,
) -> Tensor:
    """The steps of Wan's attention processor: self-attention, or cross-attention to the text; in
    image-to-video models also to the image, added to that."""
    image = None
    if attn.add_k_proj is not None and context is not None:
        length = context.shape[1] - TEXT_TOKENS
        image, context = context[:, :length], context[:, length:]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (attn.heads, -1))

    if context is None:
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = fuse.projections(QKV, hidden_states, layers)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    query, key = norm_and_rotate(fuse, attn, query, key, rotary)
    value = heads(value)
    rows = fuse.attention(query, key, value, None, attn.processor).flatten(2, 3).type_as(query)
    if image is not None:
        key = heads(attn.norm_added_k(attn.add_k_proj(image)))
        value = heads(attn.add_v_proj(image))
        seen = fuse.attention(query, key, value, None, attn.processor)
        rows = rows + seen.flatten(2, 3).type_as(query)
    rows = run_in_order(attn.to_out, rows)
    return rows


def norm_and_rotate(
    fuse: Fusions, attn: Any, query: Tensor, key: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate query and key: [B, S, H*D] -> [B, S, H, D]."""

    def rotated(x: Tensor) -> Tensor:
        return x if rotary is None else rotate(x, rotary)

    if rotary is None or torch.promote_types(query.dtype, rotary[0].dtype) == torch.float32:
        return fuse.qk_norm_rope(
            query,
            key,
            attn.norm_q,
            attn.norm_k,
            rotary,
            lambda x: rotated(x.unflatten(2, (attn.heads, -1))),
            across_heads=True,
            heads=attn.heads,
        )
    # the tables were cast with the model: eager does not rotate in float32
    query, key = (
        norm(x).unflatten(2, (attn.heads, -1))
        for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
    )
    return fuse.rope(query, key, rotary, rotated, layout="interleaved", chain="wan")


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate neighbours (a, b) of each head, in the wider dtype of rows and tables."""
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


RECIPE = Recipe(
    family="Wan",
    patches=(
        Patch(
            f"{MODULE}.WanTransformerBlock",
            block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm2", "norm3"),
            sources=("WanTransformerBlock.forward",),
            written_for=("77d7776442da",),
            programs_for=modulated_by_token,
        ),
        Patch(
            f"{MODULE}.WanAttention",
            attention,
            "QKV in one GEMM, QK-norm + RoPE in one launch",
            covers=("norm_q", "norm_k"),
            sources=(
                "WanAttention.forward",
                "WanAttnProcessor.__call__",
                "_get_qkv_projections",
                "_get_added_kv_projections",
            ),
            written_for=("24f7854be1fc",),
        ),
    ),
    chains={f"{MODULE}.WanTransformer3DModel": lambda model: model.blocks},
)
