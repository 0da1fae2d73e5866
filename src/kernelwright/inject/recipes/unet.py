"""UNets such as SDXL's: transformer blocks with plain LayerNorms.

Every addition in a block runs together with the norm after it, the last one with the first norm of
the next block; `pixart` has the chain of blocks of Transformer2DModel. GEGLU, in the feed-forward,
has a patch of its own in `generic`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..fusions import Fusions
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe
from .pixart import SOURCES, WRITTEN_FOR, is_block, is_plain, next_block


def block(fuse: Fusions) -> Forward:
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
        rows = work_ahead.take(self, hidden_states)
        # pixels may arrive transposed; eager's sums take the layout of the branch
        hidden_states = hidden_states.contiguous()
        if rows is None:
            rows = self.norm1(hidden_states)
        branch = self.attn1(
            rows,
            encoder_hidden_states=encoder_hidden_states if self.only_cross_attention else None,
            attention_mask=attention_mask,
        )
        if self.attn2 is not None:
            rows, hidden_states = fuse.residual_norm(hidden_states, branch, self.norm2)
            branch = self.attn2(
                rows,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
            )
        rows, hidden_states = fuse.residual_norm(hidden_states, branch, self.norm3)
        branch = self.ff(rows)

        after = next_block(self)
        if after is None:
            return fuse.residual(hidden_states, branch)
        rows, hidden_states = fuse.residual_norm(hidden_states, branch, after.norm1)
        work_ahead.offer(after, (hidden_states,), rows)
        return hidden_states

    return forward


RECIPE = Recipe(
    family="UNet",
    patches=(
        Patch(
            is_block("layer_norm"),
            block,
            "residual + norm, also across blocks",
            covers=("norm1", "norm2", "norm3"),
            sources=SOURCES,
            written_for=WRITTEN_FOR,
        ),
    ),
)
