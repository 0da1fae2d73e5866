"""LTX-Video.

A block modulates two norms and gates two branches; its attention normalises query and key over all
heads and rotates them by tables of the width of a token. Each of these becomes one kernel, and the
last addition of a block runs together with the first norm of the next. Keys and values of the text
are computed once per prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..fusions import QKV, Fusions
from ..fusions.compiled_ops import add
from ..fusions.projections import run_in_order
from ..reuse.rope_tables import narrow
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe, argument, class_of

MODULE = "diffusers.models.transformers.transformer_ltx"
Rotary = tuple[Tensor, Tensor]


def block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        ahead = work_ahead.take(self, hidden_states, temb)
        if ahead is None:
            parts = modulation(fuse, self, temb)
            rows = fuse.norm_modulate(self.norm1, hidden_states, parts[1], parts[0])
        else:
            parts, rows = ahead
        _, _, gate, shift_ff, scale_ff, gate_ff = parts

        attended = self.attn1(
            hidden_states=rows, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb
        )
        hidden_states = fuse.residual(hidden_states, attended, gate, reader=self.attn2)
        cross_attended = self.attn2(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            image_rotary_emb=None,
            attention_mask=encoder_attention_mask,
        )
        rows, hidden_states = fuse.residual_norm(
            hidden_states, cross_attended, self.norm2, scale=scale_ff, shift=shift_ff
        )
        branch = self.ff(rows)

        after = work_ahead.following(self)
        if after is None:
            return fuse.residual(hidden_states, branch, gate_ff)
        parts = modulation(fuse, after, temb)
        rows, hidden_states = fuse.residual_norm(
            hidden_states, branch, after.norm1, gate_ff, parts[1], parts[0]
        )
        work_ahead.offer(after, (hidden_states, temb), (parts, rows))
        return hidden_states

    return forward


def modulated_by_token(args: Any, kwargs: Any) -> bool:
    """Whether each token has a timestep of its own (image to video). A program adds the table of
    the block to a token's embedding where it needs the sum; the recipe would store all sums."""
    temb = argument(args, kwargs, 2, "temb")
    return temb is not None and temb.shape[1] > 1


def modulation(fuse: Fusions, block: Any, temb: Tensor) -> tuple[Tensor, ...]:
    """shift, scale and gate of both branches: [batch, 1 or tokens, width] each."""
    blocks = work_ahead.running()
    # with one modulation per token, those of all blocks at once would take too much memory
    if blocks and temb.shape[1] == 1 and id(block) in blocks:
        together = fuse.modulations.or_none(temb, lambda: modulations(blocks.values(), temb))
        if together is not None:
            return together[id(block)]
    return added(block.scale_shift_table.to(temb.device), temb).unbind(2)


def modulations(blocks: Iterable[Any], temb: Tensor) -> dict[int, tuple[Tensor, ...]] | None:
    """`modulation` of all blocks in one addition, by id; None if a table is on another device."""
    tables = {id(b): b.scale_shift_table for b in blocks}
    plain = all(type(t) in (Tensor, Parameter) for t in tables.values())  # not FSDP's DTensors
    if not plain or any(t.device != temb.device for t in tables.values()):
        return None
    together = added(torch.stack(list(tables.values()))[:, None, None], temb)
    return {block: parts.unbind(2) for block, parts in zip(tables, together, strict=True)}


def added(table: Tensor, temb: Tensor) -> Tensor:
    """table [..., 6, width] + temb [batch, tokens, 6 * width]"""
    parts = temb.unflatten(2, (table.shape[-2], -1))
    return add(table, parts) if temb.shape[1] == 1 else table + parts


def attention(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not is_plain(self) or kwargs:
            return NotImplemented
        return attend(
            fuse,
            self.processor,
            self,
            hidden_states,
            encoder_hidden_states,
            attention_mask,
            image_rotary_emb,
        )

    return forward


def is_plain(attn: Any) -> bool:
    """Whether it has the processor this recipe was written for, with separate projections."""
    return type(attn.processor) is class_of(f"{MODULE}.LTXVideoAttnProcessor") and not getattr(
        attn, "fused_projections", False
    )


def attend(
    fuse: Fusions,
    processor: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    attention_mask: Tensor | None,
    image_rotary_emb: Rotary | None,
) -> Tensor:
    """The steps of LTX-Video's attention processor."""
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    if attention_mask is not None:
        attention_mask = mask_per_head(fuse, attn, attention_mask, *context.shape[:2])

    def rotate(x: Tensor) -> Tensor:
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        return x if image_rotary_emb is None else apply_rotary_emb(x, image_rotary_emb)

    parts = attn._modules  # faster than through nn.Module.__getattr__, six times per call
    to_q, to_k, to_v = parts["to_q"], parts["to_k"], parts["to_v"]
    norm_q, norm_k = parts["norm_q"], parts["norm_k"]
    if encoder_hidden_states is None or image_rotary_emb is not None:
        if encoder_hidden_states is None:
            query, key, value = fuse.projections(QKV, hidden_states, (to_q, to_k, to_v))
        else:
            query, key, value = to_q(hidden_states), to_k(context), to_v(context)
        rotary = narrow(image_rotary_emb)
        query, key = fuse.qk_norm_rope(
            query, key, norm_q, norm_k, rotary, rotate, across_heads=True
        )
    else:

        def keys_and_values() -> tuple[Tensor, Tensor]:
            key, value = fuse.text_projections(context, (to_k, to_v))
            return norm_k(key), value

        layers = to_k, norm_k, to_v
        key, value = fuse.once_per_prompt(attn, context, layers, keys_and_values)
        query = norm_q(to_q(hidden_states))
    heads = attn.heads
    query, key, value = [
        t.view(*t.shape[:2], heads, t.shape[2] // heads) for t in (query, key, value)
    ]
    rows = fuse.attention(query, key, value, attention_mask, processor)
    rows = rows.flatten(2, 3).to(query.dtype)
    return run_in_order(parts["to_out"], rows)


def mask_per_head(fuse: Fusions, attn: Any, mask: Tensor, batch: int, tokens: int) -> Tensor:
    """The mask as [batch, heads, 1, tokens], computed once for all blocks."""

    def make() -> Tensor:
        prepared = attn.prepare_attention_mask(mask, tokens, batch)
        return prepared.view(batch, attn.heads, -1, prepared.shape[-1])

    return fuse.masks(mask, (attn.heads, tokens, batch), make)


def rope(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: Any = None,
        video_coords: Tensor | None = None,
    ) -> Rotary:
        scale = rope_interpolation_scale

        def make() -> Rotary:
            return type(self).forward(
                self, hidden_states, num_frames, height, width, scale, video_coords
            )

        # Dynamo of torch 2.11 cannot trace the check of the module's attributes
        if torch.compiler.is_compiling() or video_coords is not None or not is_numbers(scale):
            return make()
        sizes = (hidden_states.shape[0], hidden_states.device, num_frames, height, width)
        numbers = (sizes, None if scale is None else tuple(scale))
        return fuse.tables.cached(numbers, make)

    return forward


def is_numbers(scale: Any) -> bool:
    return scale is None or (
        isinstance(scale, tuple | list) and all(isinstance(s, int | float) for s in scale)
    )


RECIPE = Recipe(
    family="LTX-Video",
    patches=(
        Patch(
            f"{MODULE}.LTXVideoTransformerBlock",
            block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm2"),
            sources=("LTXVideoTransformerBlock.forward",),
            written_for=("330df9716285",),
            programs_for=modulated_by_token,
        ),
        Patch(
            f"{MODULE}.LTXAttention",
            attention,
            "QKV in one GEMM, QK-norm + RoPE in one launch, keys and values of the text once per "
            "prompt",
            covers=("norm_q", "norm_k"),
            sources=(
                "LTXAttention.forward",
                "LTXVideoAttnProcessor.__call__",
                "apply_rotary_emb",
            ),
            written_for=("b699d812a67f",),
        ),
        Patch(
            f"{MODULE}.LTXVideoRotaryPosEmbed",
            rope,
            "its tables computed once per resolution",
            sources=("LTXVideoRotaryPosEmbed.forward",),
            written_for=("26da63713ffe",),
        ),
    ),
    chains={f"{MODULE}.LTXVideoTransformer3DModel": lambda model: model.transformer_blocks},
)
