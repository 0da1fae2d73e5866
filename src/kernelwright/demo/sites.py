"""The places in LTX-Video's last block where the ops belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import kernelwright

from .ltx import Step


@dataclass(frozen=True)
class Site:
    """An op in the model: `eager(arguments)` runs the model's own modules, `ours(arguments, ...)`
    the op. `expected` is what flowed through the model, if a module's border shows it."""

    op: str
    where: str
    arguments: dict[str, Any]
    ours: Callable[..., Any]
    eager: Callable[[dict[str, Any]], Any]
    exact: str | None
    expected: Any = None


def ltx_sites(step: Step) -> list[Site]:
    """Every op that LTX-Video has a use for, with the arguments that flowed through the step."""
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

    model, flow = step.model, step.flow
    block = model.transformer_blocks[-1]
    attn, widening = block.attn1, block.ff.net[0]
    hidden, temb = flow.into(block), flow.into(block, "temb")
    rotary = flow.into(block, "image_rotary_emb")
    table = block.scale_shift_table
    ada = table[None, None] + temb.reshape(hidden.shape[0], temb.shape[1], table.shape[0], -1)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, _ = ada.unbind(dim=2)
    last = model.scale_shift_table[None, None] + flow.out_of(model.time_embed)[1].view(
        hidden.shape[0], -1, 1, hidden.shape[-1]
    )
    shift_out, scale_out = last[:, :, 0], last[:, :, 1]
    cos, sin = rotary
    query, key = flow.out_of(attn.norm_q), flow.out_of(attn.norm_k)

    def modulated(x: Tensor, a: dict[str, Any]) -> Tensor:
        return x * (1 + a["scale"]) + a["shift"]

    def gated_norm(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
        total = a["residual"] + a["x"]
        return modulated(block.norm2(total), a), total

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

    def rope(x: Tensor, a: dict[str, Any]) -> Tensor:
        return apply_rotary_emb(x, (a["cos"], a["sin"]))

    def site(
        op: str,
        where: str,
        arguments: dict[str, Any],
        eager: Callable[[dict[str, Any]], Any],
        exact: str | None,
        expected: Any = None,
    ) -> Site:
        function = getattr(kernelwright, op)
        return Site(
            op, where, arguments, lambda a, **how: function(**a, **how), eager, exact, expected
        )

    return [
        site(
            "rmsnorm",
            "norm1",
            {"input": hidden, "weight": None, "eps": block.norm1.eps},
            lambda a: block.norm1(a["input"]),
            "diffusers",
            flow.out_of(block.norm1),
        ),
        site(
            "modulate",
            "after norm1",
            {"x": flow.out_of(block.norm1), "scale": scale_msa, "shift": shift_msa},
            lambda a: modulated(a["x"], a),
            "diffusers",
            flow.into(attn),
        ),
        site(
            "adaln_rmsnorm",
            "norm1, modulate",
            {
                "input": hidden,
                "weight": None,
                "scale": scale_msa,
                "shift": shift_msa,
                "eps": block.norm1.eps,
            },
            lambda a: modulated(block.norm1(a["input"]), a),
            "diffusers",
            flow.into(attn),
        ),
        site(
            "apply_rope",
            "rotary embedding of q",
            {"x": query, "cos": cos, "sin": sin},
            lambda a: rope(a["x"], a),
            "diffusers",
        ),
        site(
            "apply_rope_qk",
            "rotary embedding",
            {"query": query, "key": key, "cos": cos, "sin": sin},
            lambda a: (rope(a["query"], a), rope(a["key"], a)),
            "diffusers",
        ),
        site(
            "qk_norm_rope",
            "norm_q, norm_k, rotary",
            {
                "query": flow.out_of(attn.to_q),
                "key": flow.out_of(attn.to_k),
                "q_weight": attn.norm_q.weight,
                "k_weight": attn.norm_k.weight,
                "cos": cos,
                "sin": sin,
                "eps": attn.norm_q.eps,
                "across_heads": True,
            },
            lambda a: (rope(attn.norm_q(a["query"]), a), rope(attn.norm_k(a["key"]), a)),
            "diffusers",
        ),
        site(
            "attention",
            "attn1",
            {
                "query": heads(apply_rotary_emb(query, rotary)),
                "key": heads(apply_rotary_emb(key, rotary)),
                "value": heads(flow.out_of(attn.to_v)),
            },
            lambda a: F.scaled_dot_product_attention(a["query"], a["key"], a["value"]),
            "torch",
            heads(flow.into(attn.to_out[0])),
        ),
        site(
            "gated_residual",
            "gate, add after attn1",
            {"residual": hidden, "x": flow.out_of(attn), "gate": gate_msa},
            lambda a: a["residual"] + a["x"] * a["gate"],
            "diffusers",
            flow.into(block.attn2),
        ),
        site(
            "gated_residual_norm",
            "add, norm2, modulate",
            {
                "residual": flow.into(block.attn2),
                "x": flow.out_of(block.attn2),
                "scale": scale_mlp,
                "shift": shift_mlp,
                "kind": "rms",
                "eps": block.norm2.eps,
            },
            gated_norm,
            "diffusers",
            (flow.into(block.ff), flow.into(block.norm2)),
        ),
        site(
            "linear_gelu",
            "ff: Linear, GELU",
            {
                "x": flow.into(widening),
                "weight": widening.proj.weight,
                "bias": widening.proj.bias,
            },
            lambda a: F.gelu(F.linear(a["x"], a["weight"], a["bias"]), approximate="tanh"),
            "torch",
            flow.out_of(widening),
        ),
        site(
            "layernorm",
            "norm_out",
            {"input": flow.into(model.norm_out), "eps": model.norm_out.eps},
            lambda a: model.norm_out(a["input"]),
            "torch",
            flow.out_of(model.norm_out),
        ),
        site(
            "adaln_layernorm",
            "norm_out, modulate",
            {
                "input": flow.into(model.norm_out),
                "weight": None,
                "scale": scale_out,
                "shift": shift_out,
                "eps": model.norm_out.eps,
            },
            lambda a: modulated(model.norm_out(a["input"]), a),
            "diffusers",
            flow.into(model.proj_out),
        ),
    ]
