"""Presets of diffusers' image models whose prompts are read by a language model.

Inputs are those of one denoising step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .preset import Draw, Preset, Sizes


def _qwen(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, (height, width) = sizes["batch"], _cells(sizes)
    text = draw.normal(batch, sizes["text"], config["joint_attention_dim"])
    return {
        "hidden_states": draw.normal(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": None,  # one prompt is not padded
        "timestep": draw.timestep(500.0, batch).to(draw.dtype) / 1000,
        "img_shapes": [[(1, height, width)]] * batch,
        "guidance": None,
        "attention_kwargs": {},
        "return_dict": False,
    }


QWEN_IMAGE = Preset(
    name="qwen-image",
    title="Qwen-Image",
    library="diffusers",
    class_name="QwenImageTransformer2DModel",
    config={
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    },
    tiny_config={
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": (8, 28, 28),
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 141},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 9},
    make_inputs=_qwen,
    what="1024×1024: 4096 + 141 tokens of width 3072",
    pixels=16,
)


def _qwen21(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, (height, width) = sizes["batch"], sizes["text"], _cells(sizes)
    # the encoder has one place for every four tokens of the image, after the text
    places = torch.arange(text + height * width // 4, device=draw.device) >= text
    return {
        "hidden_states": draw.normal(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": draw.normal(batch, text, config["context_in_dim"]),
        "encoder_hidden_states_mask": None,
        "timestep": draw.timestep(500.0, batch).to(draw.dtype) / 1000,
        "img_shapes": [[(1, height, width)]] * batch,
        "img_mask": places.expand(batch, -1),
        "attention_kwargs": {},
        "return_dict": False,
    }


QWEN_IMAGE_2_1 = Preset(
    name="qwen-image-2.1",
    title="Qwen-Image 2.1",
    library="diffusers",
    class_name="QwenImage21Transformer2DModel",
    config={
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 32,
        "attention_head_dim": 128,
        "num_attention_heads": 32,
        "context_in_dim": 4096,
        "mlp_ratio": 3,
        "axes_dims_rope": (16, 56, 56),
        "eps": 1e-6,
        "causal_condition": True,
    },
    tiny_config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "context_in_dim": 64,
        "axes_dims_rope": (8, 28, 28),
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 141},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 9},
    make_inputs=_qwen21,
    what="1024×1024: 4096 + 141 tokens of width 4096 in one sequence, the text causal",
    pixels=32,
)


def _z_image(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, (height, width) = sizes["batch"], _latent_cells(sizes)
    return {
        "x": [draw.normal(config["in_channels"], 1, height, width) for _ in range(batch)],
        "t": draw.timestep(0.0625, batch),
        "cap_feats": [draw.normal(sizes["text"], config["cap_feat_dim"]) for _ in range(batch)],
        "return_dict": False,
    }


Z_IMAGE = Preset(
    name="z-image",
    title="Z-Image",
    library="diffusers",
    class_name="ZImageTransformer2DModel",
    config={
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 16,
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "cap_feat_dim": 2560,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1024, 512, 512],
    },
    tiny_config={
        "dim": 128,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 64,
        "axes_dims": [16, 24, 24],
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 101},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 9},
    make_inputs=_z_image,
    what="1024×1024: 4096 + 128 tokens of width 3840 in one sequence",
    pixels=16,
    depth=("n_layers", "n_refiner_layers"),
)


def _lumina(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], *_latent_cells(sizes)),
        "timestep": draw.timestep(0.0625, batch),
        "encoder_hidden_states": draw.normal(batch, text, config["cap_feat_dim"]),
        "encoder_attention_mask": draw.mask(batch, text).long(),
        "return_dict": False,
    }


LUMINA2 = Preset(
    name="lumina2",
    title="Lumina-Image 2.0",
    library="diffusers",
    class_name="Lumina2Transformer2DModel",
    config={
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "hidden_size": 2304,
        "num_layers": 26,
        "num_refiner_layers": 2,
        "num_attention_heads": 24,
        "num_kv_heads": 8,
        "multiple_of": 256,
        "ffn_dim_multiplier": None,
        "norm_eps": 1e-5,
        "scaling_factor": 1.0,
        "axes_dim_rope": (32, 32, 32),
        "axes_lens": (300, 512, 512),
        "cap_feat_dim": 2304,
    },
    tiny_config={
        "sample_size": 8,
        "hidden_size": 192,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "multiple_of": 64,
        "axes_dim_rope": (16, 16, 16),
        "cap_feat_dim": 64,
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 256},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 12},
    make_inputs=_lumina,
    what="1024×1024: 4096 + 64 tokens of width 2304 in one sequence, 24 heads on 8",
    pixels=16,
    depth=("num_layers", "num_refiner_layers"),
)


def _krea(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, (height, width) = sizes["batch"], sizes["text"], _cells(sizes)
    words = draw.normal(batch, text, config["num_text_layers"], config["text_hidden_dim"])
    places = torch.cat([torch.zeros(text, 3, device=draw.device), draw.grid(1, height, width)])
    return {
        "hidden_states": draw.normal(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": words,
        "timestep": draw.timestep(500.0, batch).to(draw.dtype) / 1000,
        "position_ids": places,
        "encoder_attention_mask": draw.mask(batch, text),
        "return_dict": False,
    }


KREA_2 = Preset(
    name="krea-2",
    title="Krea 2",
    library="diffusers",
    class_name="Krea2Transformer2DModel",
    config={
        "in_channels": 64,
        "num_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384,
        "timestep_embed_dim": 256,
        "text_hidden_dim": 2560,
        "num_text_layers": 12,
        "text_num_attention_heads": 20,
        "text_num_key_value_heads": 20,
        "text_intermediate_size": 6912,
        "num_layerwise_text_blocks": 2,
        "num_refiner_text_blocks": 2,
        "axes_dims_rope": (32, 48, 48),
        "rope_theta": 1000.0,
        "norm_eps": 1e-5,
    },
    tiny_config={
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "text_hidden_dim": 64,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 128,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (16, 24, 24),
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 512},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 12},
    make_inputs=_krea,
    what="1024×1024: 4096 + 512 tokens of width 6144 in one sequence, 48 heads on 12",
    pixels=16,
    depth=("num_layers", "num_layerwise_text_blocks", "num_refiner_text_blocks"),
)

# how Ideogram 4 marks the tokens of its sequence; padding is 0
IDEOGRAM_TEXT, IDEOGRAM_IMAGE = 3, 2
IDEOGRAM_FIRST_POSITION = 65536  # of the image, away from those of words


def _ideogram(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, (height, width) = sizes["batch"], sizes["text"], _cells(sizes)
    # padding is on the left, and image tokens follow the words
    words = draw.mask(batch, text).flip(1)
    image = torch.ones(batch, height * width, dtype=torch.bool, device=draw.device)
    kinds = [words * IDEOGRAM_TEXT, image * IDEOGRAM_IMAGE]
    spoken = torch.where(words, words.cumsum(1) - 1, 0)[..., None].expand(-1, -1, 3)
    seen = (draw.grid(1, height, width) + IDEOGRAM_FIRST_POSITION).expand(batch, -1, -1)
    features = draw.normal(batch, text, config["llm_features_dim"])
    latents = draw.normal(batch, height * width, config["in_channels"])
    return {
        "hidden_states": torch.cat([latents.new_zeros(batch, text, latents.shape[2]), latents], 1),
        "timestep": draw.timestep(0.5, batch).to(draw.dtype),
        "encoder_hidden_states": torch.cat(
            [
                torch.where(words[..., None], features, 0),
                features.new_zeros(batch, height * width, features.shape[2]),
            ],
            dim=1,
        ),
        "position_ids": torch.cat([spoken, seen], dim=1),
        "segment_ids": torch.where(torch.cat([words, image], dim=1), 1, -1),
        "indicator": torch.cat(kinds, dim=1),
        "return_dict": False,
    }


IDEOGRAM_4 = Preset(
    name="ideogram-4",
    title="Ideogram 4",
    library="diffusers",
    class_name="Ideogram4Transformer2DModel",
    config={
        "in_channels": 128,
        "num_layers": 34,
        "attention_head_dim": 256,
        "num_attention_heads": 18,
        "intermediate_size": 12288,
        "adaln_dim": 512,
        "llm_features_dim": 53248,
        "rope_theta": 5_000_000,
        "mrope_section": (24, 20, 20),
        "norm_eps": 1e-5,
    },
    tiny_config={
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "adaln_dim": 64,
        "llm_features_dim": 64,
        "mrope_section": (12, 10, 10),
    },
    sizes={"batch": 1, "height": 2048, "width": 2048, "text": 2048},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 12},
    make_inputs=_ideogram,
    what="2048×2048: 16384 + 2048 tokens of width 4608 in one sequence, heads of 256, a dense mask",
    pixels=16,
)


def _cells(sizes: Sizes) -> tuple[int, int]:
    """Rows and columns of image tokens, each of 16 x 16 pixels."""
    return sizes["height"] // 16, sizes["width"] // 16


def _latent_cells(sizes: Sizes) -> tuple[int, int]:
    """Rows and columns of an autoencoder that shrinks each side by 8."""
    return sizes["height"] // 8, sizes["width"] // 8


PRESETS = (QWEN_IMAGE, QWEN_IMAGE_2_1, Z_IMAGE, LUMINA2, KREA_2, IDEOGRAM_4)
