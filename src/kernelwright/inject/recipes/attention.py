"""The attention of diffusers that UNets, PixArt, DiT and many others share.

It has no norm or RoPE to fuse, but steps to skip: its forward inspects the signature of its
processor at every call, and divides the result by 1; and keys and values of the text are the same
at every step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..fusions import QKV, Fusions
from ..fusions.projections import run_in_order
from ._recipe import Forward, Patch, Recipe, class_of, full_name

NAME = "AttnProcessor2_0"
PROCESSOR = f"diffusers.models.attention_processor.{NAME}"


def attention(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Any:
        if not is_plain(self) or cross_attention_kwargs or hidden_states.ndim != 3:
            return NotImplemented
        return attend(fuse, self, hidden_states, encoder_hidden_states, attention_mask)

    return forward


def is_attention(module: nn.Module) -> bool | str:
    if full_name(type(module)) != "diffusers.models.attention_processor.Attention":
        return False
    if type(module.processor) is not class_of(PROCESSOR):
        return f"no recipe for its {type(module.processor).__name__}"
    return is_plain(module) or "it normalises its input over channels"


def is_plain(attn: Any) -> bool:
    return (
        type(attn.processor) is class_of(PROCESSOR)
        and attn.spatial_norm is None
        and attn.group_norm is None
    )


def attend(
    fuse: Fusions,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """The steps of the processor for tokens [batch, tokens, width]."""
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    batch, tokens, _ = context.shape
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, tokens, batch)
        mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
    if encoder_hidden_states is not None and attn.norm_cross:
        context = attn.norm_encoder_hidden_states(context)

    if encoder_hidden_states is None:
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = fuse.projections(QKV, hidden_states, layers)
    elif attn.norm_cross:
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    else:
        query, text_layers = attn.to_q(hidden_states), (attn.to_k, attn.to_v)
        key, value = fuse.once_per_prompt(
            attn, context, text_layers, lambda: fuse.text_projections(context, text_layers)
        )
    query, key, value = (t.unflatten(-1, (attn.heads, -1)) for t in (query, key, value))
    if attn.norm_q is not None:
        query = attn.norm_q(query)
    if attn.norm_k is not None:
        key = attn.norm_k(key)
    rows = fuse.sdpa(query, key, value, mask=mask).flatten(2, 3).to(query.dtype)
    rows = run_in_order(attn.to_out, rows)
    if attn.residual_connection:
        rows = rows + hidden_states
    return rows if attn.rescale_output_factor == 1 else rows / attn.rescale_output_factor


RECIPE = Recipe(
    family="attention of diffusers",
    patches=(
        Patch(
            is_attention,
            attention,
            "QKV in one GEMM, fewer steps around attention, keys and values of the text once per "
            "prompt",
            sources=("Attention.forward", f"{NAME}.__call__"),
            written_for=("86cb5d2bf499",),
        ),
    ),
)
