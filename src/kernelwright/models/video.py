"""Presets of diffusers' video models. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _ltx(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    frames, height, width = (
        (sizes["frames"] - 1) // 8 + 1,
        sizes["height"] // 32,
        sizes["width"] // 32,
    )
    return {
        "hidden_states": draw.normal(batch, frames * height * width, config["in_channels"]),
        "encoder_hidden_states": draw.normal(batch, text, config["caption_channels"]),
        "timestep": draw.timestep(937.5, batch),
        "encoder_attention_mask": draw.mask(batch, text),
        "num_frames": frames,
        "height": height,
        "width": width,
        # seconds per latent frame at 25 frames per second, pixels per latent cell
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }


LTX_VIDEO = Preset(
    name="ltx-video",
    title="LTX-Video 2B",
    library="diffusers",
    class_name="LTXVideoTransformer3DModel",
    config={
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "cross_attention_dim": 2048,
        "num_layers": 28,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": 4096,
        "attention_bias": True,
        "attention_out_bias": True,
    },
    tiny_config={
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "cross_attention_dim": 128,
        "num_layers": 2,
        "caption_channels": 64,
    },
    sizes={"batch": 2, "frames": 49, "height": 512, "width": 768, "text": 128},
    tiny_sizes={"batch": 2, "frames": 17, "height": 64, "width": 96, "text": 12},
    make_inputs=_ltx,
    pixels=32,
    frames=8,
)


def _wan(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    frames, height, width = (
        (sizes["frames"] - 1) // 4 + 1,
        sizes["height"] // 8,
        sizes["width"] // 8,
    )
    words = draw.normal(batch, text, config["text_dim"])
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], frames, height, width),
        "timestep": draw.timestep(937, batch),
        # its pipeline passes no mask, and zeros where the prompt is padded
        "encoder_hidden_states": torch.where(draw.mask(batch, text)[..., None], words, 0),
        "return_dict": False,
    }


WAN_1_3B = Preset(
    name="wan-1.3b",
    title="Wan 2.1 1.3B",
    library="diffusers",
    class_name="WanTransformer3DModel",
    config={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 8960,
        "num_layers": 30,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    },
    tiny_config={
        "num_attention_heads": 2,
        "text_dim": 64,
        "ffn_dim": 512,
        "num_layers": 2,
    },
    sizes={"batch": 1, "frames": 81, "height": 480, "width": 832, "text": 512},
    tiny_sizes={"batch": 1, "frames": 9, "height": 32, "width": 48, "text": 8},
    make_inputs=_wan,
    pixels=16,
    frames=4,
)

PRESETS = (LTX_VIDEO, WAN_1_3B)
