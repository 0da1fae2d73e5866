"""A small LTX-Video transformer and the places in its last block where the ops belong.

Hooks keep the inputs and outputs of its modules during one denoise step, so every site holds the
tensors, views and strides included, that diffusers itself worked on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kernelwright

HEAD_DIM = 64
LATENT_CHANNELS = 128
LAYERS = 2
GUIDANCE = 3.0


@dataclass(frozen=True)
class LtxSize:
    """LTX-Video with fewer layers and, if asked, fewer heads. `latent` is frames, height, width."""

    heads: int
    latent: tuple[int, int, int]
    text_tokens: int
    caption_channels: int

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def tokens(self) -> int:
        frames, height, width = self.latent
        return frames * height * width

    def __str__(self) -> str:
        return f"LTX-Video of {LAYERS} layers, {self.tokens} tokens of width {self.width}"


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


@dataclass(frozen=True)
class Step:
    """One denoise step in plain diffusers: how long it took, and the sites it passed."""

    ms: float
    sites: tuple[Site, ...]


def capture(size: LtxSize, device: torch.device, dtype: torch.dtype) -> Step:
    """Build the model, take one denoise step with guidance, and keep what flowed through it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model = _build(size, device, dtype)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(30, device=device)
    latents, model_inputs = _inputs(size, device, dtype)
    t = scheduler.timesteps[0]
    flow = _Flow(model)
    start = time.perf_counter()
    noise = model(
        hidden_states=latents.repeat(2, 1, 1).to(dtype),
        timestep=t.expand(2),
        return_dict=False,
        **model_inputs,
    )[0]
    unconditional, conditional = noise.float().chunk(2)
    guided = unconditional + GUIDANCE * (conditional - unconditional)
    latents = scheduler.step(guided, t, latents, return_dict=False)[0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ms = (time.perf_counter() - start) * 1e3
    flow.close()
    return Step(ms, tuple(_sites(model, flow)))


def _build(size: LtxSize, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import LTXVideoTransformer3DModel

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = LTXVideoTransformer3DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=size.heads,
            attention_head_dim=HEAD_DIM,
            cross_attention_dim=size.width,
            num_layers=LAYERS,
            caption_channels=size.caption_channels,
        )
        for module in model.modules():
            # a weight of ones would hide whether it is read at all
            if isinstance(module, nn.RMSNorm) and module.weight is not None:
                module.weight.copy_(1 + 0.1 * torch.randn_like(module.weight))
    # the plain cast: diffusers' own `to` warns about float32 modules that LTX-Video does not have
    return nn.Module.to(model, dtype).eval()


def _inputs(
    size: LtxSize, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    """float32 latents [1, S, C], and the rest of a forward with guidance (batch 2)."""
    generator = torch.Generator().manual_seed(0)
    frames, height, width = size.latent
    latents = torch.randn(1, size.tokens, LATENT_CHANNELS, generator=generator)
    text = torch.randn(2, size.text_tokens, size.caption_channels, generator=generator)
    mask = torch.ones(2, size.text_tokens)
    mask[0, size.text_tokens // 4 :] = 0  # the empty prompt is mostly padding
    return latents.to(device), {
        "encoder_hidden_states": text.to(device, dtype),
        "encoder_attention_mask": mask.to(device, dtype),
        "num_frames": frames,
        "height": height,
        "width": width,
        # seconds a latent frame at 25 frames a second, pixels a latent cell
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


class _Flow:
    """Inputs and outputs of the modules of a model, by module, while its hooks are in place."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.outputs: dict[nn.Module, Any] = {}
        self._hooks = [
            m.register_forward_hook(self._keep, with_kwargs=True) for m in model.modules()
        ]

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inputs[module] = args, kwargs
        self.outputs[module] = output

    def into(self, module: nn.Module, name: str = "hidden_states") -> Any:
        args, kwargs = self.inputs[module]
        return kwargs[name] if name in kwargs else args[0]

    def out_of(self, module: nn.Module) -> Any:
        return self.outputs[module]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _sites(model: Any, flow: _Flow) -> list[Site]:
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

    block = model.transformer_blocks[-1]
    attn = block.attn1
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
