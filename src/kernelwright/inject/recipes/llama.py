"""Llama, Mistral, Qwen2, Qwen3, and every model family of transformers with the same code.

A layer adds two branches to its residual stream and normalises after each: addition and norm become
one kernel, the last addition together with the first norm of the next layer or with the final norm.
RoPE of query and key is one launch, with their norms where a model has them, and with the write of
keys and values where tokens are decoded into a static cache. The gated activation of the
feed-forward is one kernel.

Modules are matched by the code of their forward, not by class names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..fusions import QKV, Fusions
from ..fusions.attention import SDPA
from ..identify import norm_kinds
from ..identify.norm_kinds import Norm
from ..identify.source import fingerprint, is_plain_loop
from ..runtime import work_ahead
from ._recipe import Chain, Forward, Patch, Recipe, full_name

# transformers 5.17 to 5.22
LAYER = "ecfc0010cf77"  # LlamaDecoderLayer
MLP = "a63053b7956b"  # LlamaMLP
LLAMA, MISTRAL, QWEN2, QWEN3 = "2fc5664d94ae", "741ad75452c4", "8a4b8238783c", "ede566726f97"
SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
ATTENTION = (LLAMA, MISTRAL, QWEN2, QWEN3)
CHANGED = "its forward is not one the recipe was written for"

Rotary = tuple[Tensor, Tensor]
ROPE: dict[str, Any] = {"layout": "half", "chain": "transformers"}


def layer(fuse: Fusions) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Rotary | None = None,
        **kwargs: Any,
    ) -> Tensor:
        rows = work_ahead.take(self, hidden_states)
        if rows is None:
            rows = self.input_layernorm(hidden_states)
        branch, _ = self.self_attn(
            hidden_states=rows,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        rows, hidden_states = fuse.residual_norm(
            hidden_states, branch, self.post_attention_layernorm
        )
        branch = self.mlp(rows)
        after = work_ahead.following(self)
        if after is None:
            return fuse.residual(hidden_states, branch)
        norm = getattr(after, "input_layernorm", after)
        rows, hidden_states = fuse.residual_norm(hidden_states, branch, norm)
        work_ahead.offer(after, (hidden_states,), rows)
        return hidden_states

    return forward


def is_layer(module: nn.Module) -> bool | str:
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    if not all(name in module._modules for name in parts):
        return False
    if fingerprint(type(module).forward) != LAYER:
        return CHANGED
    found = norm_kinds.describe(module.post_attention_layernorm)  # type: ignore[arg-type]
    return True if isinstance(found, Norm) else f"no kernel for its norm: {found}"


def leaves_attention(layer: Any) -> bool:
    return is_attention(layer.self_attn) is not True


def layer_chain(model: nn.Module) -> Chain | None:
    """The layers of a model in order, then its final norm."""
    layers = model._modules.get("layers")
    if not isinstance(layers, nn.ModuleList) or not all(is_layer(m) is True for m in layers):
        return None
    if "norm" not in model._modules or not is_plain_loop(type(model).forward, "layers", "norm"):
        return None
    return lambda model: [*model.layers, model.norm]


def rotation(apply_rope: Callable[..., Any], rotary: Rotary) -> Callable[[Tensor], Tensor]:
    """`apply_rotary_pos_emb` of a model, for one tensor [batch, tokens, heads, dim]."""

    def rotate(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        # it expects two tensors: pass one without heads as the second
        return apply_rope(x, x[:, :0], *rotary)[0].transpose(1, 2)

    return rotate


def attention(fuse: Fusions, kind: type[nn.Module]) -> Forward:
    """The forward for one class of attention, with the functions of its own Python module."""
    code = fingerprint(kind.forward)
    own = kind.forward.__globals__
    interfaces, eager_attention = own["ALL_ATTENTION_FUNCTIONS"], own["eager_attention_forward"]
    apply_rope = own["apply_rotary_pos_emb"]

    def window(self: Any) -> dict[str, Any]:
        if code == LLAMA:
            return {}
        if code == MISTRAL:
            return {"sliding_window": getattr(self.config, "sliding_window", None)}
        return {"sliding_window": self.sliding_window}

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tokens = hidden_states.shape[:-1]
        heads = (*tokens, -1, self.head_dim)
        layers = self.q_proj, self.k_proj, self.v_proj
        query, key, value = fuse.projections(QKV, hidden_states, layers)
        query, key, value = query.view(heads), key.view(heads), value.view(heads)
        rotary, rotate = position_embeddings, rotation(apply_rope, position_embeddings)
        norms = (self.q_norm, self.k_norm) if code == QWEN3 else None
        cache, index, written = past_key_values, self.layer_idx, None
        if cache is not None:
            written = fuse.rope_into_cache(
                cache, index, query, key, value, norms, rotary, rotate, **ROPE
            )
        if written is not None:
            query, key, value = written
        else:
            if cache is not None:
                value = value.contiguous()  # a view in the cache would keep query and key alive
            if norms is not None:
                query, key = fuse.qk_norm_rope(query, key, *norms, rotary, rotate, **ROPE)
            else:
                query, key = fuse.rope(query, key, rotary, rotate, **ROPE)
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            if cache is not None:
                key, value = cache.update(key, value, index)
        attend = interfaces.get_interface(self.config._attn_implementation, eager_attention)

        def attended(mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return attend(
                self,
                query,
                key,
                value,
                mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **window(self),
                **kwargs,
            )

        # a paged cache is written to in `attend`, which must not run twice then
        if getattr(attend, "__module__", None) == SDPA and kwargs.get("cache") is None:
            rows, weights = fuse.attend_grouped(
                attended, query, key, value, attention_mask, self.scaling
            )
        else:
            rows, weights = attended(attention_mask)
        return fuse.linear(self.o_proj, rows.reshape(*tokens, -1).contiguous()), weights

    return forward


def is_attention(module: nn.Module) -> bool | str:
    if not all(name in module._modules for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
        return False
    return True if fingerprint(type(module).forward) in ATTENTION else CHANGED


def mlp(fuse: Fusions) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return fuse.gated_feed_forward(self.gate_proj, self.up_proj, self.act_fn, self.down_proj, x)

    return forward


def is_mlp(module: nn.Module) -> bool | str:
    if not all(name in module._modules for name in ("gate_proj", "up_proj", "down_proj")):
        return False
    if fingerprint(type(module).forward) != MLP:
        return CHANGED
    name = full_name(type(module.act_fn))
    return True if name in SILU else f"its activation is {name.rpartition('.')[2]}, not SiLU"


RECIPE = Recipe(
    family="Llama and models with its code",
    patches=(
        Patch(
            is_layer,
            layer,
            "residual + norm, also across layers",
            covers=("input_layernorm", "post_attention_layernorm"),
            leaves_parts=leaves_attention,
        ),
        Patch(
            is_attention,
            attention,
            "QKV in one GEMM, RoPE in one launch, with QK-norm where there is one",
            covers=("q_norm", "k_norm"),
            for_class=True,
        ),
        Patch(is_mlp, mlp, "gate and up in one GEMM, SwiGLU in one kernel"),
    ),
    chains=layer_chain,
)
