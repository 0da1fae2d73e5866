"""The preset of SDXL's UNet. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _sdxl(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, height, width = sizes["batch"], sizes["height"], sizes["width"]
    # original size, corner of the crop, target size
    micro = torch.tensor([height, width, 0, 0, height, width], dtype=draw.dtype)
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    return {
        "sample": draw.normal(batch, config["in_channels"], height // 8, width // 8),
        "timestep": draw.timestep(937.0, 1)[0],
        "encoder_hidden_states": draw.normal(batch, sizes["text"], config["cross_attention_dim"]),
        "added_cond_kwargs": {
            "text_embeds": draw.normal(batch, pooled),
            "time_ids": micro.to(draw.device).repeat(batch, 1),
        },
        "return_dict": False,
    }


SDXL_UNET = Preset(
    name="sdxl-unet",
    title="Stable Diffusion XL UNet",
    library="diffusers",
    class_name="UNet2DConditionModel",
    config={
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "center_input_sample": False,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "only_cross_attention": False,
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "downsample_padding": 1,
        "mid_block_scale_factor": 1,
        "act_fn": "silu",
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "cross_attention_dim": 2048,
        "transformer_layers_per_block": (1, 2, 10),
        # despite its name, the number of heads of each level
        "attention_head_dim": (5, 10, 20),
        "dual_cross_attention": False,
        "use_linear_projection": True,
        "upcast_attention": None,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "time_embedding_type": "positional",
        "resnet_time_scale_shift": "default",
        "resnet_skip_time_act": False,
        "resnet_out_scale_factor": 1.0,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
    },
    tiny_config={
        "sample_size": 8,
        "block_out_channels": (32, 64, 128),
        "layers_per_block": 1,
        "cross_attention_dim": 64,
        "transformer_layers_per_block": (1, 2, 2),
        "attention_head_dim": (1, 1, 2),
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 256,
    },
    sizes={"batch": 2, "height": 1024, "width": 1024, "text": 77},
    tiny_sizes={"batch": 2, "height": 32, "width": 64, "text": 7},
    make_inputs=_sdxl,
    what="1024×1024, batch 2: 128×128 cells, 77 tokens of text",
    pixels=8,
    depth=("layers_per_block", "transformer_layers_per_block"),
)

PRESETS = (SDXL_UNET,)
