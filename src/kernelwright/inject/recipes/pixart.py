"""PixArt: diffusers' BasicTransformerBlock with norms that the timestep modulates.

Each modulation becomes one kernel with the norm before it and, where there is one, with the gate
and the addition before that; the last addition of a block runs with the first norm of the next. The
same class with plain norms is used in UNets: see `unet`. DiT has a projection of the timestep in
each block and needs no recipe: its programs are faster (on an H200 2.9 ms with graphs and 19.7
without, 3.2 and 29.2 by the recipe that it had).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..fusions import Fusions
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
        if timestep is None or not is_plain(self, hidden_states, cross_attention_kwargs):
            return NotImplemented
        ahead = work_ahead.take(self, hidden_states, timestep)
        # patches arrive transposed; eager's sums take the layout of the branch
        hidden_states = hidden_states.contiguous()
        if ahead is None:
            parts = modulation(self, hidden_states, timestep)
            rows = fuse.norm_modulate(self.norm1, hidden_states, parts[1], parts[0])
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
            self.norm2,
            gate if self.attn2 is None else None,
            scale_ff,
            shift_ff,
        )
        branch = self.ff(rows)

        after = next_block(self)
        if after is None:
            return fuse.residual(hidden_states, branch, gate_ff)
        parts = modulation(after, hidden_states, timestep)
        rows, total = fuse.residual_norm(
            hidden_states, branch, after.norm1, gate_ff, parts[1], parts[0]
        )
        if total.dtype == hidden_states.dtype:
            work_ahead.offer(after, (total, timestep), (parts, rows))
        return total

    return forward


def modulation(block: Any, rows: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
    """shift, scale and gate of both branches for `rows`: [batch, 1, width] each. PixArt projects
    the timestep once and adds a table of each block."""
    return add(block.scale_shift_table, timestep.reshape(rows.shape[0], 6, -1)).chunk(6, dim=1)


def is_block(*norm_types: str) -> Callable[[nn.Module], bool | str]:
    """A BasicTransformerBlock with one of these types of norm."""

    def matches(module: Any) -> bool | str:
        if full_name(type(module)) != BLOCK or module.norm_type not in norm_types:
            return False
        if module.pos_embed is not None:
            return "it adds positional embeddings between norm and attention"
        return True

    return matches


def is_plain(block: Any, hidden_states: Tensor, cross_attention_kwargs: Any) -> bool:
    """Whether the recipe handles this call. It does not handle GLIGEN and other arguments of
    attention, a chunked feed-forward, or tokens in more than one dimension."""
    return not cross_attention_kwargs and block._chunk_size is None and hidden_states.ndim == 3


def next_block(block: Any) -> Any:
    """The next block, if it has the same kind of norms and this one may work ahead for it."""
    after: Any = work_ahead.following(block)
    if type(after) is not type(block) or after.norm_type != block.norm_type:
        return None
    return after


def blocks(model: Any) -> Sequence[nn.Module]:
    return model.transformer_blocks


RECIPE = Recipe(
    family="PixArt",
    patches=(
        Patch(
            is_block("ada_norm_single"),
            modulated_block,
            "norm + modulate, gate + residual + norm + modulate, also across blocks",
            covers=("norm1", "norm2"),
            sources=SOURCES,
            written_for=WRITTEN_FOR,
        ),
    ),
    chains={
        f"{MODELS}.pixart_transformer_2d.PixArtTransformer2DModel": blocks,
        f"{MODELS}.transformer_2d.Transformer2DModel": blocks,
    },
)
