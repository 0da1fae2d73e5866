"""A small LTX-Video transformer, and one denoise step of it in plain diffusers.

Hooks keep the inputs and outputs of its modules during the step, so the ops can be given the
tensors, views and strides included, that diffusers itself worked on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
class Step:
    """One denoise step: the model, what flowed through it, and how long it took."""

    model: Any
    flow: Flow
    ms: float


def denoise(size: LtxSize, device: torch.device, dtype: torch.dtype) -> Step:
    """Build the model, take one denoise step with guidance, and keep what flowed through it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model = _build(size, device, dtype)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(30, device=device)
    latents, model_inputs = _inputs(size, device, dtype)
    t = scheduler.timesteps[0]

    def predict() -> Tensor:
        return model(
            hidden_states=latents.repeat(2, 1, 1).to(dtype),
            timestep=t.expand(2),
            return_dict=False,
            **model_inputs,
        )[0]

    if device.type == "cuda":
        predict()  # the first call loads cuBLAS and picks its algorithms
        torch.cuda.synchronize(device)
    flow = Flow(model)
    start = time.perf_counter()
    unconditional, conditional = predict().float().chunk(2)
    guided = unconditional + GUIDANCE * (conditional - unconditional)
    scheduler.step(guided, t, latents, return_dict=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ms = (time.perf_counter() - start) * 1e3
    flow.close()
    return Step(model, flow, ms)


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


class Flow:
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
