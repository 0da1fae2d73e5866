"""Presets of HunyuanVideo. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _hunyuan(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    cells = (sizes["frames"] - 1) // 4 + 1, sizes["height"] // 8, sizes["width"] // 8
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], *cells),
        "timestep": draw.timestep(937.0, batch),
        "encoder_hidden_states": draw.normal(batch, text, config["text_embed_dim"]),
        "encoder_attention_mask": draw.mask(batch, text).to(draw.dtype),
        "pooled_projections": draw.normal(batch, config["pooled_projection_dim"]),
        "guidance": draw.timestep(6000.0, batch).to(draw.dtype),
        "return_dict": False,
    }


HUNYUAN_VIDEO = Preset(
    name="hunyuan-video",
    title="HunyuanVideo",
    library="diffusers",
    class_name="HunyuanVideoTransformer3DModel",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
    },
    tiny_config={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "pooled_projection_dim": 64,
        "rope_axes_dim": (8, 28, 28),
    },
    sizes={"batch": 1, "frames": 33, "height": 544, "width": 960, "text": 256},
    tiny_sizes={"batch": 1, "frames": 9, "height": 32, "width": 48, "text": 8},
    make_inputs=_hunyuan,
    what="33 frames of 960×544: 18360 + 256 tokens of width 3072, the text masked",
    pixels=16,
    frames=4,
    depth=("num_layers", "num_single_layers", "num_refiner_layers"),
)


def _hunyuan15(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, picture = sizes["batch"], sizes["text"], sizes["picture"]
    cells = (sizes["frames"] - 1) // 4 + 1, sizes["height"] // 16, sizes["width"] // 16
    latents = draw.normal(batch, config["out_channels"], *cells)
    # text to video: zeros for the latents of a picture and for their mask
    condition = config["in_channels"] - config["out_channels"]
    glyphs = draw.mask(batch, sizes["glyphs"])
    words = draw.normal(batch, sizes["glyphs"], config["text_embed_2_dim"])
    return {
        "hidden_states": torch.cat([latents, latents.new_zeros(batch, condition, *cells)], dim=1),
        "timestep": draw.timestep(937.0, batch).to(draw.dtype),
        "encoder_hidden_states": draw.normal(batch, text, config["text_embed_dim"]),
        "encoder_attention_mask": draw.mask(batch, text).long(),
        "encoder_hidden_states_2": torch.where(glyphs[..., None], words, 0),
        "encoder_attention_mask_2": glyphs.long(),
        # the model finds no picture in zeros, and masks their tokens
        "image_embeds": latents.new_zeros(batch, picture, config["image_embed_dim"]),
        "return_dict": False,
    }


HUNYUAN_VIDEO_1_5 = Preset(
    name="hunyuan-video-1.5",
    title="HunyuanVideo 1.5",
    library="diffusers",
    class_name="HunyuanVideo15Transformer3DModel",
    config={
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
        "target_size": 640,
        "task_type": "t2v",
    },
    tiny_config={
        "in_channels": 17,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "text_embed_2_dim": 64,
        "image_embed_dim": 64,
        "rope_axes_dim": (8, 28, 28),
    },
    sizes={
        "batch": 1,
        "frames": 45,
        "height": 480,
        "width": 848,
        "text": 1000,
        "glyphs": 256,
        "picture": 729,
    },
    tiny_sizes={
        "batch": 1,
        "frames": 9,
        "height": 64,
        "width": 96,
        "text": 12,
        "glyphs": 8,
        "picture": 4,
    },
    make_inputs=_hunyuan15,
    what="45 frames of 848×480: 19080 + 1985 tokens of width 2048, a mask over all pairs",
    pixels=16,
    frames=4,
    depth=("num_layers", "num_refiner_layers"),
)

PRESETS = (HUNYUAN_VIDEO, HUNYUAN_VIDEO_1_5)
