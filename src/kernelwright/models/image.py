"""Presets of diffusers' image models. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _sd3(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch = sizes["batch"]
    return {
        "hidden_states": _latents(draw, config, sizes),
        "encoder_hidden_states": draw.normal(batch, sizes["text"], config["joint_attention_dim"]),
        "pooled_projections": draw.normal(batch, config["pooled_projection_dim"]),
        "timestep": draw.timestep(937.5, batch),
        "return_dict": False,
    }


def _sd3_shallow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """As many blocks with a second attention as without; those come first."""
    dual = config["dual_attention_layers"][:layers]
    count = min(config["num_layers"], len(dual) + layers)
    return {"num_layers": count, "dual_attention_layers": dual}


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
    what="1024×1024, batch 2: 4096 + 333 tokens of width 1536",
    pixels=16,
    depth=("num_layers", "dual_attention_layers"),
    shallow=_sd3_shallow,
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
    what="1024×1024, batch 2: 4096 tokens of width 1152, 300 of text",
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
    what="256×256, batch 2: 256 tokens of width 1152",
    pixels=16,
)


def _sana(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    cells = sizes["height"] // 32, sizes["width"] // 32  # its autoencoder shrinks each side by 32
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], *cells),
        "encoder_hidden_states": draw.normal(batch, text, config["caption_channels"]),
        "encoder_attention_mask": draw.mask(batch, text).long(),
        "timestep": draw.timestep(937.5, batch),
        "return_dict": False,
    }


SANA_1_6B = Preset(
    name="sana-1.6b",
    title="SANA 1.6B 1024",
    library="diffusers",
    class_name="SanaTransformer2DModel",
    config={
        "in_channels": 32,
        "out_channels": 32,
        "num_attention_heads": 70,
        "attention_head_dim": 32,
        "num_layers": 20,
        "num_cross_attention_heads": 20,
        "cross_attention_head_dim": 112,
        "cross_attention_dim": 2240,
        "caption_channels": 2304,
        "mlp_ratio": 2.5,
        "dropout": 0.0,
        "attention_bias": False,
        "sample_size": 32,
        "patch_size": 1,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "interpolation_scale": None,
        "guidance_embeds": False,
        "qk_norm": None,
    },
    tiny_config={
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 4,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 64,
        "cross_attention_dim": 128,
        "caption_channels": 64,
        "sample_size": 4,
    },
    sizes={"batch": 2, "height": 1024, "width": 1024, "text": 300},
    tiny_sizes={"batch": 2, "height": 128, "width": 192, "text": 12},
    make_inputs=_sana,
    what="1024×1024, batch 2: 1024 tokens of width 2240, linear attention, 300 of text",
    pixels=32,
)


def _aura(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    return {
        "hidden_states": _latents(draw, config, sizes),
        "encoder_hidden_states": draw.normal(batch, text, config["joint_attention_dim"]),
        "timestep": draw.timestep(937.5, batch).to(draw.dtype) / 1000,
        "return_dict": False,
    }


AURAFLOW = Preset(
    name="auraflow",
    title="AuraFlow 0.3",
    library="diffusers",
    class_name="AuraFlowTransformer2DModel",
    config={
        "sample_size": 64,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 4,
        "num_single_dit_layers": 32,
        "attention_head_dim": 256,
        "num_attention_heads": 12,
        "joint_attention_dim": 2048,
        "caption_projection_dim": 3072,
        "out_channels": 4,
        "pos_embed_max_size": 9216,
    },
    tiny_config={
        "sample_size": 8,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "caption_projection_dim": 128,
        "pos_embed_max_size": 64,
    },
    sizes={"batch": 2, "height": 1024, "width": 1024, "text": 256},
    tiny_sizes={"batch": 2, "height": 64, "width": 64, "text": 12},
    make_inputs=_aura,
    what="1024×1024, batch 2: 4096 + 264 tokens of width 3072, heads of 256",
    pixels=16,
    depth=("num_mmdit_layers", "num_single_dit_layers"),
)


def _latents(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> torch.Tensor:
    """[batch, channels, height, width] of an autoencoder that shrinks each side by 8."""
    cells = sizes["height"] // 8, sizes["width"] // 8
    return draw.normal(sizes["batch"], config["in_channels"], *cells)


PRESETS = (SD3_5_MEDIUM, PIXART, DIT_XL, SANA_1_6B, AURAFLOW)
