"""PixArt and DiT: diffusers' BasicTransformerBlock with norms that the timestep modulates.

Each modulation becomes one kernel with the norm before it and, where there is one, with the gate
and the addition before that; the last addition of a block runs with the first norm of the next. The
same class with plain norms is used in UNets: see `unet`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..fusions import Fusions, hooked_now
from ..fusions.compiled_ops import add
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe, full_name

BLOCK = "diffusers.models.attention.BasicTransformerBlock"
SOURCES = ("BasicTransformerBlock.forward",)
WRITTEN_FOR = ("58c2f5b68e5c",)
MODELS = "diffusers.models.transformers"


def modulated_block(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        if not is_plain(self, hidden_states, cross_attention_kwargs):
            return NotImplemented
        given = [t for t in (timestep, class_labels) if t is not None]
        ahead = work_ahead.take(self, hidden_states, *given)
        # patches arrive transposed; eager's sums take the layout of the branch
        hidden_states = hidden_states.contiguous()
        if ahead is None:
            parts = modulation(self, hidden_states, timestep, class_labels)
            rows = fuse.norm_modulate(norms(self)[0], hidden_states, parts[1], parts[0])
        else:
            parts, rows = ahead
        _, _, gate, shift_ff, scale_ff, gate_ff = parts

        branch = self.attn1(
            rows,
            encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
            attention_mask=attention_mask,
        )
        if self.attn2 is not None:
            hidden_states = fuse.residual(hidden_states, branch, gate, reader=self.attn2)
            branch = self.attn2(  # PixArt does not normalise its input nor gate its output
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
            )
        rows, hidden_states = fuse.residual_norm(
            hidden_states,
            branch,
            norms(self)[1],
            gate if self.attn2 is None else None,
            scale_ff,
            shift_ff,
        )
        branch = self.ff(rows)

        after = next_block(self)
        if after is None:
            return fuse.residual(hidden_states, branch, gate_ff)
        parts = modulation(after, hidden_states, timestep, class_labels)
        rows, total = fuse.residual_norm(
            hidden_states, branch, norms(after)[0], gate_ff, parts[1], parts[0]
        )
        if total.dtype == hidden_states.dtype:
            work_ahead.offer(after, (total, *given), (parts, rows))
        return total

    return forward


def norms(block: Any) -> tuple[Any, Any]:
    """The norm before the first attention, and that before the feed-forward."""
    if block.norm_type == "ada_norm_zero":
        return block.norm1.norm, block.norm3
    return block.norm1, block.norm2


def modulation(
    block: Any, rows: Tensor, timestep: Any, class_labels: Tensor | None
) -> tuple[Tensor, ...]:
    """shift, scale and gate of both branches for `rows`: [batch, 1, width] each. PixArt projects
    the timestep once and adds a table of each block; DiT has a projection in each block."""
    if block.norm_type == "ada_norm_zero":
        norm = block.norm1
        parts = norm.linear(norm.silu(norm.emb(timestep, class_labels, hidden_dtype=rows.dtype)))
        return parts.unsqueeze(1).chunk(6, dim=2)
    return add(block.scale_shift_table, timestep.reshape(rows.shape[0], 6, -1)).chunk(6, dim=1)


def is_block(*norm_types: str) -> Callable[[nn.Module], bool | str]:
    """A BasicTransformerBlock with one of these types of norm."""

    def matches(module: Any) -> bool | str:
        if full_name(type(module)) != BLOCK or module.norm_type not in norm_types:
            return False
        if module.pos_embed is not None:
            return "it adds positional embeddings between norm and attention"
        if module.norm_type == "ada_norm_zero" and module.attn2 is not None:
            return "AdaLayerNormZero with a second attention: no known model has that"
        return True

    return matches


def is_plain(block: Any, hidden_states: Tensor, cross_attention_kwargs: Any) -> bool:
    """Whether the recipe handles this call. It does not handle GLIGEN and other arguments of
    attention, a chunked feed-forward, tokens in more than one dimension, or hooks on a norm."""
    return (
        not cross_attention_kwargs
        and block._chunk_size is None
        and hidden_states.ndim == 3
        and may_read_norms(block)
    )


def may_read_norms(block: Any) -> bool:
    if block.norm_type != "ada_norm_zero":
        return True
    return not hooked_now(block.norm1) and not hooked_now(block.norm1.norm)


def next_block(block: Any) -> Any:
    """The next block, if it has the same kind of norms and this one may work ahead for it."""
    after: Any = work_ahead.following(block)
    if type(after) is not type(block) or after.norm_type != block.norm_type:
        return None
    return after if may_read_norms(after) else None


def blocks(model: Any) -> Sequence[nn.Module]:
    return model.transformer_blocks


RECIPE = Recipe(
    family="PixArt, DiT",
    patches=(
        Patch(
            is_block("ada_norm_single"),
            modulated_block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm2"),
            sources=SOURCES,
            written_for=WRITTEN_FOR,
        ),
        Patch(
            is_block("ada_norm_zero"),
            modulated_block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm3"),
            sources=(*SOURCES, "AdaLayerNormZero.forward"),
            written_for=("0abfc9dd029e",),
        ),
    ),
    chains={
        f"{MODELS}.pixart_transformer_2d.PixArtTransformer2DModel": blocks,
        f"{MODELS}.dit_transformer_2d.DiTTransformer2DModel": blocks,
        f"{MODELS}.transformer_2d.Transformer2DModel": blocks,
    },
)
