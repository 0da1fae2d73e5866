"""FLUX.1.

The double blocks keep text and image separate and concatenate them for attention only; the single
blocks work on the concatenation, yet return two tensors. Norm and modulation, gate, residual and
the next norm, and QK-norm with RoPE become one kernel each. A block computes the first norms of the
next, and a single block also offers it the concatenated tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fusions import QKV, TEXT_QKV, Fusions
from ..fusions.compiled_ops import concat_tokens
from ..fusions.projections import run_in_order
from ..runtime import work_ahead
from ..runtime.forwards import hooked
from ._joint import IGNORED_ARGUMENTS, Rotary, Stream, joint_qk
from ._recipe import Forward, Patch, Recipe, class_of
from .adaln import adaptive_norm, can_fuse_adaptive_norm

MODULE = "diffusers.models.transformers.transformer_flux"
Arguments = dict[str, Any] | None


def block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        joint_attention_kwargs: Arguments = None,
    ) -> tuple[Tensor, Tensor]:
        ahead = work_ahead.take(self, hidden_states, encoder_hidden_states, temb)
        if ahead is None:
            image = self.norm1(hidden_states, emb=temb)
            text = self.norm1_context(encoder_hidden_states, emb=temb)
        else:
            image, text = ahead
        attended, text_attended, *added = self.attn(
            hidden_states=image[0],
            encoder_hidden_states=text[0],
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        gate, shift, scale, last_gate = (t[:, None] for t in image[1:])
        rows, hidden_states = fuse.residual_norm(
            hidden_states, attended, self.norm2, gate, scale, shift
        )
        branch = self.ff(rows)

        gate, shift, scale, text_last_gate = (t[:, None] for t in text[1:])
        rows, encoder_hidden_states = fuse.residual_norm(
            encoder_hidden_states, text_attended, self.norm2_context, gate, scale, shift
        )
        text_branch = self.ff_context(rows)

        after = None if added else next_block(self, encoder_hidden_states, temb)
        if after is None:
            hidden_states = fuse.residual(hidden_states, branch, last_gate)
            if added:
                hidden_states = hidden_states + added[0]
            encoder_hidden_states = fuse.residual(
                encoder_hidden_states, text_branch, text_last_gate
            )
            return clipped(encoder_hidden_states), hidden_states
        image, hidden_states = adaptive_norm(
            fuse, after.norm1, temb, hidden_states, branch, last_gate
        )
        text, encoder_hidden_states = adaptive_norm(
            fuse, after.norm1_context, temb, encoder_hidden_states, text_branch, text_last_gate
        )
        work_ahead.offer(after, (hidden_states, encoder_hidden_states, temb), (image, text))
        return encoder_hidden_states, hidden_states

    return forward


def single_block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary | None = None,
        joint_attention_kwargs: Arguments = None,
    ) -> tuple[Tensor, Tensor]:
        text_tokens = encoder_hidden_states.shape[1]
        streams = encoder_hidden_states, hidden_states
        tokens = None
        if (ahead := work_ahead.take(self, hidden_states, encoder_hidden_states, temb)) is not None:
            tokens, (rows, gate) = ahead
        elif (normed := norm_of_streams(fuse, self.norm, streams, temb)) is not None:
            rows, gate = normed
        else:
            tokens = torch.cat(streams, dim=1)
            rows, gate = self.norm(tokens, emb=temb)
        attended = self.attn(
            hidden_states=rows,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        branch = fuse.joined_linear(self.proj_out, attended, self.proj_mlp, self.act_mlp, rows)
        gate = gate[:, None]

        if tokens is None:
            tokens = clipped(fuse.joint_residual(streams, branch, gate))
            return tokens[:, :text_tokens], tokens[:, text_tokens:]
        after = next_block(self, tokens, temb)
        if after is None:
            tokens = clipped(fuse.residual(tokens, branch, gate))
            return tokens[:, :text_tokens], tokens[:, text_tokens:]
        ahead, tokens = adaptive_norm(fuse, after.norm, temb, tokens, branch, gate)
        encoder_hidden_states, hidden_states = tokens[:, :text_tokens], tokens[:, text_tokens:]
        work_ahead.offer(after, (hidden_states, encoder_hidden_states, temb), (tokens, ahead))
        return encoder_hidden_states, hidden_states

    return forward


def norm_of_streams(
    fuse: Fusions, norm: Any, streams: tuple[Tensor, Tensor], temb: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The norm of both streams and the gate, without a concatenation; torch.compile only."""
    traced = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if not traced or hooked(norm) or not can_fuse_adaptive_norm(norm, temb):
        return None
    shift, scale, gate = norm.linear(norm.silu(temb)).chunk(3, dim=1)
    rows = fuse.joint_norm_modulate(norm.norm, streams, scale[:, None], shift[:, None])
    return None if rows is None else (rows, gate)


def next_block(block: Any, tokens: Tensor, temb: Tensor) -> Any:
    """The next block, if it is of the same class and its first norms may run in this one."""
    after: Any = work_ahead.following(block)
    # in float16 the sum is clipped before it is normalised
    if type(after) is not type(block) or tokens.dtype == torch.float16:
        return None
    names = ("norm1", "norm1_context") if hasattr(after, "norm1") else ("norm",)
    return after if all(can_fuse_adaptive_norm(getattr(after, n), temb) for n in names) else None


def clipped(x: Tensor) -> Tensor:
    """x clipped to the range of float16, as eager does in float16."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def attention(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> Any:
        alone = encoder_hidden_states is None
        if not is_plain(self, alone) or kwargs.keys() - IGNORED_ARGUMENTS:
            return NotImplemented
        return attend(
            fuse, self, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )

    return forward


def is_plain(attn: Any, alone: bool) -> bool:
    """Whether it has the processor this recipe was written for, with separate projections, and is
    given the text as well only where it projects that."""
    return (
        type(attn.processor) is class_of(f"{MODULE}.FluxAttnProcessor")
        and not attn.fused_projections
        and alone == (attn.added_kv_proj_dim is None)
    )


def attend(
    fuse: Fusions,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    attention_mask: Tensor | None,
    image_rotary_emb: Rotary | None,
) -> Any:
    """The steps of FLUX's attention processor."""
    from diffusers.models.embeddings import apply_rotary_emb

    def heads(name: str, x: Tensor, *layers: Any) -> list[Tensor]:
        projected = fuse.projections(name, x, layers)
        return [t.unflatten(-1, (-1, attn.head_dim)) for t in projected]

    def rotate(x: Tensor, tables: Rotary) -> Tensor:
        return apply_rotary_emb(x, tables, sequence_dim=1)

    if image_rotary_emb is not None:
        cos, sin = image_rotary_emb
        image_rotary_emb = cos.to(hidden_states.device), sin.to(hidden_states.device)
    query, key, value = heads(QKV, hidden_states, attn.to_q, attn.to_k, attn.to_v)
    streams = [Stream(query, key, attn.norm_q, attn.norm_k)]
    if encoder_hidden_states is not None:
        layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        query, key, text_value = heads(TEXT_QKV, encoder_hidden_states, *layers)
        streams.insert(0, Stream(query, key, attn.norm_added_q, attn.norm_added_k))
        value = concat_tokens([text_value, value])

    query, key = joint_qk(fuse, streams, image_rotary_emb, rotate)
    rows = fuse.attention(query, key, value, attention_mask, attn.processor)
    rows = rows.flatten(2, 3).to(query.dtype)
    if encoder_hidden_states is None:
        return rows
    text_tokens = encoder_hidden_states.shape[1]
    text, image = rows.split_with_sizes([text_tokens, rows.shape[1] - text_tokens], dim=1)
    image = run_in_order(attn.to_out, image.contiguous())
    return image, attn.to_add_out(text.contiguous())


def blocks(model: Any) -> list[Any]:
    return [*model.transformer_blocks, *model.single_transformer_blocks]


ACROSS = "norm + modulate, gate + residual + norm + modulate, also across blocks"
RECIPE = Recipe(
    family="FLUX.1",
    patches=(
        Patch(
            f"{MODULE}.FluxTransformerBlock",
            block,
            ACROSS,
            covers=("norm1", "norm1_context", "norm2", "norm2_context"),
            sources=("FluxTransformerBlock.forward",),
            written_for=("7c3a9152e771",),
        ),
        Patch(
            f"{MODULE}.FluxSingleTransformerBlock",
            single_block,
            ACROSS,
            covers=("norm",),
            sources=("FluxSingleTransformerBlock.forward",),
            written_for=("4a4d6aa1c952",),
        ),
        Patch(
            f"{MODULE}.FluxAttention",
            attention,
            "QKV in one GEMM, QK-norm + RoPE in one launch",
            covers=("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
            sources=(
                "FluxAttention.forward",
                "FluxAttnProcessor.__call__",
                "_get_projections",
                "apply_rotary_emb",
            ),
            written_for=("44404da2c4ad",),
        ),
    ),
    chains={
        f"{MODULE}.FluxTransformer2DModel": blocks,
        "diffusers.models.controlnets.controlnet_flux.FluxControlNetModel": blocks,
    },
)
