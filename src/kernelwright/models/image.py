"""Presets of diffusers' image models. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _flux(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    height, width = sizes["height"] // 16, sizes["width"] // 16
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)
    return {
        "hidden_states": draw.normal(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": draw.normal(batch, text, config["joint_attention_dim"]),
        "pooled_projections": draw.normal(batch, config["pooled_projection_dim"]),
        # the model multiplies both by 1000 in its dtype: values that stay exact in bfloat16, so
        # that a float32 run gets the same inputs
        "timestep": draw.timestep(500.0, batch).to(draw.dtype) / 1000,
        "guidance": draw.timestep(4.0, batch),
        "img_ids": places.to(draw.device, draw.dtype),
        "txt_ids": torch.zeros(text, 3, device=draw.device, dtype=draw.dtype),
        "return_dict": False,
    }


FLUX_DEV = Preset(
    name="flux-dev",
    title="FLUX.1-dev",
    library="diffusers",
    class_name="FluxTransformer2DModel",
    config={
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    tiny_config={
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 64,
        "axes_dims_rope": (8, 28, 28),
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 512},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 9},
    make_inputs=_flux,
    pixels=16,
)


def _sd3(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch = sizes["batch"]
    return {
        "hidden_states": _latents(draw, config, sizes),
        "encoder_hidden_states": draw.normal(batch, sizes["text"], config["joint_attention_dim"]),
        "pooled_projections": draw.normal(batch, config["pooled_projection_dim"]),
        "timestep": draw.timestep(937.5, batch),
        "return_dict": False,
    }


SD3_5_MEDIUM = Preset(
    name="sd3.5-medium",
    title="Stable Diffusion 3.5 medium",
    library="diffusers",
    class_name="SD3Transformer2DModel",
    config={
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    tiny_config={
        "sample_size": 8,
        "num_layers": 5,  # two dual, two plain, and the last, which drops the text
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 12,
        "dual_attention_layers": (0, 1),
    },
    # 77 tokens of the two CLIP encoders and 256 of T5
    sizes={"batch": 2, "height": 1024, "width": 1024, "text": 77 + 256},
    tiny_sizes={"batch": 2, "height": 32, "width": 48, "text": 7},
    make_inputs=_sd3,
    pixels=16,
)


def _pixart(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    return {
        "hidden_states": _latents(draw, config, sizes),
        "encoder_hidden_states": draw.normal(batch, text, config["caption_channels"]),
        "encoder_attention_mask": draw.mask(batch, text).long(),
        "timestep": draw.timestep(937, batch),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


PIXART = Preset(
    name="pixart",
    title="PixArt-Sigma XL 1024",
    library="diffusers",
    class_name="PixArtTransformer2DModel",
    config={
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "dropout": 0.0,
        "norm_num_groups": 32,
        "cross_attention_dim": 1152,
        "attention_bias": True,
        "sample_size": 128,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "upcast_attention": False,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "interpolation_scale": 2,
        "use_additional_conditions": False,
        "caption_channels": 4096,
        "attention_type": "default",
    },
    tiny_config={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "cross_attention_dim": 128,
        "sample_size": 8,
        "caption_channels": 64,
    },
    sizes={"batch": 2, "height": 1024, "width": 1024, "text": 300},
    tiny_sizes={"batch": 2, "height": 64, "width": 64, "text": 12},
    make_inputs=_pixart,
    pixels=16,
)


def _dit(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, cells = sizes["batch"], sizes["side"] // 8
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], cells, cells),
        "timestep": draw.timestep(937, batch),
        "class_labels": draw.integers(config["num_embeds_ada_norm"], batch),
        "return_dict": False,
    }


DIT_XL = Preset(
    name="dit-xl",
    title="DiT-XL/2 256",
    library="diffusers",
    class_name="DiTTransformer2DModel",
    config={
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 28,
        "dropout": 0.0,
        "norm_num_groups": 32,
        "attention_bias": True,
        "sample_size": 32,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "upcast_attention": False,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-5,
    },
    tiny_config={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "sample_size": 8,
        "num_embeds_ada_norm": 10,
    },
    sizes={"batch": 2, "side": 256},
    tiny_sizes={"batch": 2, "side": 64},
    make_inputs=_dit,
    pixels=16,
)


def _latents(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> torch.Tensor:
    """[batch, channels, height, width] of an autoencoder that shrinks each side by 8."""
    cells = sizes["height"] // 8, sizes["width"] // 8
    return draw.normal(sizes["batch"], config["in_channels"], *cells)


PRESETS = (FLUX_DEV, SD3_5_MEDIUM, PIXART, DIT_XL)
