"""Stable Diffusion 3 and 3.5.

A block keeps text and image separate and concatenates them for attention; some blocks of 3.5 have a
second attention over the image, and the last one drops the text. Norm and modulation, gate,
residual and the next norm become one kernel each, across blocks too; query and key are normalised
into their slices of the concatenation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..fusions import QKV, TEXT_QKV, Fusions
from ..fusions.compiled_ops import concat_tokens
from ..fusions.projections import run_linear
from ..runtime import work_ahead
from ._joint import IGNORED_ARGUMENTS, Stream, joint_qk
from ._recipe import Forward, Patch, Recipe, class_of, full_name
from .adaln import adaptive_norm, can_fuse_adaptive_norm

NAME = "JointAttnProcessor2_0"
PROCESSOR = f"diffusers.models.attention_processor.{NAME}"
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        if self._chunk_size is not None:
            return NotImplemented
        kwargs = joint_attention_kwargs or {}
        ahead = work_ahead.take(self, hidden_states, encoder_hidden_states, temb)
        image, text = ahead or first_norms(self, hidden_states, encoder_hidden_states, temb)
        attended, text_attended = self.attn(
            hidden_states=image[0], encoder_hidden_states=text[0], **kwargs
        )
        gate, shift, scale, last_gate = (t[:, None] for t in image[1:5])
        if self.use_dual_attention:
            hidden_states = fuse.residual(hidden_states, attended, gate)
            attended, gate = self.attn2(hidden_states=image[5], **kwargs), image[6][:, None]
        rows, hidden_states = fuse.residual_norm(
            hidden_states, attended, self.norm2, gate, scale, shift
        )
        branch = self.ff(rows)
        if self.context_pre_only:
            return None, fuse.residual(hidden_states, branch, last_gate)

        gate, shift, scale, text_last_gate = (t[:, None] for t in text[1:])
        rows, encoder_hidden_states = fuse.residual_norm(
            encoder_hidden_states, text_attended, self.norm2_context, gate, scale, shift
        )
        text_branch = self.ff_context(rows)

        after = next_block(self, temb)
        if after is None:
            hidden_states = fuse.residual(hidden_states, branch, last_gate)
            return fuse.residual(encoder_hidden_states, text_branch, text_last_gate), hidden_states
        image, hidden_states = adaptive_norm(
            fuse, after.norm1, temb, hidden_states, branch, last_gate
        )
        text, encoder_hidden_states = adaptive_norm(
            fuse, after.norm1_context, temb, encoder_hidden_states, text_branch, text_last_gate
        )
        work_ahead.offer(after, (hidden_states, encoder_hidden_states, temb), (image, text))
        return encoder_hidden_states, hidden_states

    return forward


def first_norms(block: Any, image: Tensor, text: Tensor, temb: Tensor) -> tuple[Any, Any]:
    """The first norms of both streams: rows, then the gates and modulations for later steps."""
    normed = block.norm1(image, emb=temb)
    if block.context_pre_only:
        return normed, (block.norm1_context(text, temb),)
    return normed, block.norm1_context(text, emb=temb)


def next_block(block: Any, temb: Tensor) -> Any:
    """The next block, if its first norms may run in this one."""
    after: Any = work_ahead.following(block)
    if type(after) is not type(block) or after._chunk_size is not None:
        return None
    norms = after.norm1, after.norm1_context
    return after if all(can_fuse_adaptive_norm(norm, temb) for norm in norms) else None


def attention(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        plain = type(self.processor) is class_of(PROCESSOR)
        if not plain or cross_attention_kwargs.keys() - IGNORED_ARGUMENTS:
            return NotImplemented
        return attend(fuse, self, hidden_states, encoder_hidden_states)

    return forward


def is_joint(module: nn.Module) -> bool | str:
    """The attention of SD3; many other models use the same class."""
    return full_name(type(module)) == "diffusers.models.attention_processor.Attention" and type(
        module.processor
    ) is class_of(PROCESSOR)


def attend(
    fuse: Fusions, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None
) -> Any:
    """The steps of SD3's attention processor, which takes no mask."""

    def heads(name: str, x: Tensor, *layers: Any) -> list[Tensor]:
        projected = fuse.projections(name, x, layers)
        return [t.unflatten(-1, (attn.heads, -1)) for t in projected]

    query, key, value = heads(QKV, hidden_states, attn.to_q, attn.to_k, attn.to_v)
    streams = [Stream(query, key, attn.norm_q, attn.norm_k)]
    if encoder_hidden_states is not None:
        layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        query, key, text_value = heads(TEXT_QKV, encoder_hidden_states, *layers)
        streams.append(Stream(query, key, attn.norm_added_q, attn.norm_added_k))
        value = concat_tokens([value, text_value])

    query, key = joint_qk(fuse, streams)
    rows = fuse.sdpa(query, key, value, gathered=len(streams) > 1)
    rows = rows.flatten(2, 3).to(query.dtype)
    tokens = hidden_states.shape[1]
    image = attn.to_out[1](fuse.linear_of_first_tokens(attn.to_out[0], rows, tokens))
    if encoder_hidden_states is None:
        return image
    text = rows[:, tokens:]
    return image, text if attn.context_pre_only else run_linear(attn.to_add_out, text)


RECIPE = Recipe(
    family="Stable Diffusion 3",
    patches=(
        Patch(
            "diffusers.models.attention.JointTransformerBlock",
            block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm1_context", "norm2", "norm2_context"),
            sources=("JointTransformerBlock.forward",),
            written_for=("a9bf5b8a14d0",),
        ),
        Patch(
            is_joint,
            attention,
            "QKV in one GEMM, QK-norm of both streams without a concatenation",
            covers=NORMS,
            sources=("Attention.forward", f"{NAME}.__call__"),
            written_for=("bdde2630dad5",),
        ),
    ),
    chains={
        "diffusers.models.transformers.transformer_sd3.SD3Transformer2DModel": (
            lambda model: model.transformer_blocks
        ),
    },
)
