"""Falcon.

The 7B normalises once per layer, runs attention and feed-forward in parallel on the same rows, and
adds both: the addition becomes one kernel with the norm of the next layer, or with the final norm.
The 40B has a norm for each branch, the 1B runs its branches one after the other. RoPE of query and
key is one launch. All heads of the 7B share one key, which PyTorch's attention is not told: it
computes all scores in float32. Tiers that may round otherwise take a kernel that shares keys.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..fusions import Fusions
from ..identify.source import fingerprint
from ..runtime import work_ahead
from ._recipe import Forward, Patch, Recipe, full_name
from .llama import CHANGED, ROPE, Rotary, rotation

MODULE = "transformers.models.falcon.modeling_falcon"
# transformers 5.17 to 5.22
LAYER, ATTENTION = "41520b3fbab6", "5ed8ec28b143"


def layer(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Rotary | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rows = work_ahead.take(self, hidden_states)
        if rows is None:
            rows = first_norm(self)(hidden_states)
        attended, weights = self.self_attention(
            rows,
            layer_past=layer_past,
            attention_mask=attention_mask,
            position_ids=position_ids,
            alibi=alibi,
            use_cache=use_cache,
            output_attentions=output_attentions,
            position_embeddings=position_embeddings,
        )
        if has_two_norms(self):
            branch = self.mlp(self.ln_mlp(hidden_states)) + attended
        elif self.config.parallel_attn:
            branch = self.mlp(rows) + attended
        else:
            attended = F.dropout(attended, self.config.attention_dropout, self.training)
            rows, hidden_states = fuse.residual_norm(
                hidden_states, attended, self.post_attention_layernorm
            )
            branch = self.mlp(rows)
        branch = F.dropout(branch, self.config.hidden_dropout, self.training)

        after = work_ahead.following(self)
        if after is None:
            return fuse.residual(hidden_states, branch), weights
        norm = after if isinstance(after, nn.LayerNorm) else first_norm(after)
        rows, hidden_states = fuse.residual_norm(hidden_states, branch, norm)
        work_ahead.offer(after, (hidden_states,), rows)
        return hidden_states, weights

    return forward


def has_two_norms(layer: Any) -> bool:
    config = layer.config
    return config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2


def first_norm(layer: Any) -> Any:
    return layer.ln_attn if has_two_norms(layer) else layer.input_layernorm


def attention(fuse: Fusions, kind: type[nn.Module]) -> Forward:
    apply_rope = kind.forward.__globals__["apply_rotary_pos_emb"]

    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Rotary | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        by_sdpa = self.config._attn_implementation == "sdpa" and not output_attentions
        if alibi is not None or position_embeddings is None or not by_sdpa:
            return NotImplemented
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        rotate = rotation(apply_rope, position_embeddings)
        query, key = fuse.rope(query, key, position_embeddings, rotate, **ROPE)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        causal = self.is_causal and attention_mask is None and query.shape[2] > 1
        rows = fuse.sdpa_of_shared_keys(query, key, value, attention_mask, causal)
        return self.dense(rows.transpose(1, 2).flatten(2)), None

    return forward


def is_layer(module: nn.Module) -> bool | str:
    return _is(module, "FalconDecoderLayer", LAYER)


def is_attention(module: nn.Module) -> bool | str:
    return _is(module, "FalconAttention", ATTENTION)


def _is(module: nn.Module, name: str, code: str) -> bool | str:
    if full_name(type(module)) != f"{MODULE}.{name}":
        return False
    return True if fingerprint(type(module).forward) == code else CHANGED


RECIPE = Recipe(
    family="Falcon",
    patches=(
        Patch(
            is_layer,
            layer,
            "residual + norm, also across layers",
            covers=("input_layernorm", "ln_attn", "post_attention_layernorm"),
        ),
        Patch(is_attention, attention, "RoPE of query and key in one launch", for_class=True),
    ),
    chains={f"{MODULE}.FalconModel": lambda model: [*model.h, model.ln_f]},
)
