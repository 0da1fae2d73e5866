"""Presets of diffusers' video models. Inputs are those of one denoising step."""

from __future__ import annotations

import math
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
    what="49 frames of 768×512, batch 2: 2688 tokens of width 2048, 128 of text",
    pixels=32,
    frames=8,
)


def _wan(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    words = draw.normal(batch, text, config["text_dim"])
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], *_cells(sizes, 4)),
        "timestep": draw.timestep(937, batch),
        # its pipeline passes no mask, and zeros where the prompt is padded
        "encoder_hidden_states": torch.where(draw.mask(batch, text)[..., None], words, 0),
        "return_dict": False,
    }


def _wan_config(**size: Any) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
        **size,
    }


WAN_TINY = {"num_attention_heads": 2, "text_dim": 64, "ffn_dim": 512, "num_layers": 2}
WAN_TINY_SIZES = {"batch": 1, "frames": 9, "height": 32, "width": 48, "text": 8}

WAN_1_3B = Preset(
    name="wan-1.3b",
    title="Wan 2.1 1.3B",
    library="diffusers",
    class_name="WanTransformer3DModel",
    config=_wan_config(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    tiny_config=WAN_TINY,
    sizes={"batch": 1, "frames": 81, "height": 480, "width": 832, "text": 512},
    tiny_sizes=WAN_TINY_SIZES,
    make_inputs=_wan,
    what="81 frames of 832×480: 32760 tokens of width 1536, 512 of text",
    pixels=16,
    frames=4,
)

WAN_2_2_14B = Preset(
    name="wan-2.2-14b",
    title="Wan 2.2 A14B, one of its two models",
    library="diffusers",
    class_name="WanTransformer3DModel",
    config=_wan_config(num_attention_heads=40, ffn_dim=13824, num_layers=40),
    tiny_config=WAN_TINY,
    sizes={"batch": 1, "frames": 45, "height": 480, "width": 832, "text": 512},
    tiny_sizes=WAN_TINY_SIZES,
    make_inputs=_wan,
    what="45 frames of 832×480: 18720 tokens of width 5120, 512 of text",
    pixels=16,
    frames=4,
)


def _wan_per_token(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    # its autoencoder shrinks each side by 16, twice as much
    halved = {**sizes, "height": sizes["height"] // 2, "width": sizes["width"] // 2}
    given = _wan(draw, config, halved)
    batch, _, *cells = given["hidden_states"].shape
    tokens = math.prod(n // p for n, p in zip(cells, config["patch_size"], strict=True))
    return {**given, "timestep": torch.full((batch, tokens), 937.0, device=draw.device)}


WAN_2_2_5B = Preset(
    name="wan-2.2-5b",
    title="Wan 2.2 TI2V 5B",
    library="diffusers",
    class_name="WanTransformer3DModel",
    config=_wan_config(
        num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30
    ),
    tiny_config={**WAN_TINY, "in_channels": 16, "out_channels": 16},
    sizes={"batch": 1, "frames": 81, "height": 704, "width": 1280, "text": 512},
    tiny_sizes={**WAN_TINY_SIZES, "height": 64, "width": 96},
    make_inputs=_wan_per_token,
    what="81 frames of 1280×704: 18480 tokens of width 3072, a timestep for each, 512 of text",
    pixels=32,
    frames=4,
)


def _cogvideox(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    batch, (frames, height, width) = sizes["batch"], _cells(sizes, 4)
    grid = height // config["patch_size"], width // config["patch_size"]
    rotary = get_3d_rotary_pos_embed(
        embed_dim=config["attention_head_dim"],
        crops_coords=((0, 0), grid),
        grid_size=grid,
        temporal_size=frames,
        device=torch.device("cpu"),
    )
    text = config["max_text_seq_length"]
    return {
        "hidden_states": draw.normal(batch, frames, config["in_channels"], height, width),
        "encoder_hidden_states": draw.normal(batch, text, config["text_embed_dim"]),
        "timestep": draw.timestep(937, batch),
        "image_rotary_emb": tuple(table.to(draw.device) for table in rotary),
        "return_dict": False,
    }


COGVIDEOX_5B = Preset(
    name="cogvideox-5b",
    title="CogVideoX 5B",
    library="diffusers",
    class_name="CogVideoXTransformer3DModel",
    config={
        "num_attention_heads": 48,
        "attention_head_dim": 64,
        "in_channels": 16,
        "out_channels": 16,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "time_embed_dim": 512,
        "text_embed_dim": 4096,
        "num_layers": 42,
        "dropout": 0.0,
        "attention_bias": True,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 226,
        "activation_fn": "gelu-approximate",
        "timestep_activation_fn": "silu",
        "norm_elementwise_affine": True,
        "norm_eps": 1e-5,
        "spatial_interpolation_scale": 1.875,
        "temporal_interpolation_scale": 1.0,
        "use_rotary_positional_embeddings": True,
    },
    tiny_config={
        "num_attention_heads": 2,
        "time_embed_dim": 64,
        "text_embed_dim": 64,
        "num_layers": 2,
        "sample_width": 6,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": 8,
    },
    sizes={"batch": 1, "frames": 49, "height": 480, "width": 720},
    tiny_sizes={"batch": 1, "frames": 9, "height": 32, "width": 48},
    make_inputs=_cogvideox,
    what="49 frames of 720×480: 17550 + 226 tokens of width 3072",
    pixels=16,
    frames=4,
)


def _mochi(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], config["max_sequence_length"]
    return {
        "hidden_states": draw.normal(batch, config["in_channels"], *_cells(sizes, 6)),
        "encoder_hidden_states": draw.normal(batch, text, config["text_embed_dim"]),
        "timestep": draw.timestep(937.0, batch).to(draw.dtype),
        "encoder_attention_mask": draw.mask(batch, text),
        "return_dict": False,
    }


MOCHI = Preset(
    name="mochi",
    title="Mochi 1",
    library="diffusers",
    class_name="MochiTransformer3DModel",
    config={
        "patch_size": 2,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 48,
        "pooled_projection_dim": 1536,
        "in_channels": 12,
        "out_channels": None,
        "qk_norm": "rms_norm",
        "text_embed_dim": 4096,
        "time_embed_dim": 256,
        "activation_fn": "swiglu",
        "max_sequence_length": 256,
    },
    tiny_config={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 3,  # two, and the last, which drops the text
        "pooled_projection_dim": 64,
        "text_embed_dim": 64,
        "time_embed_dim": 64,
        "max_sequence_length": 8,
    },
    sizes={"batch": 2, "frames": 31, "height": 480, "width": 848},
    tiny_sizes={"batch": 2, "frames": 7, "height": 32, "width": 48},
    make_inputs=_mochi,
    what="31 frames of 848×480, batch 2: 9540 + 256 tokens of width 3072",
    pixels=16,
    frames=6,
)


def _kandinsky5(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, (frames, height, width) = sizes["batch"], sizes["text"], _cells(sizes, 4)
    latents = draw.normal(batch, frames, height, width, config["in_visual_dim"])
    # no picture is given: its latents and its mask are zeros
    picture = latents.new_zeros(*latents.shape[:-1], config["in_visual_dim"] + 1)
    grid = (n // p for n, p in zip((frames, height, width), config["patch_size"], strict=True))
    return {
        "hidden_states": torch.cat([latents, picture], dim=-1),
        "encoder_hidden_states": draw.normal(batch, text, config["in_text_dim"]),
        "pooled_projections": draw.normal(batch, config["in_text_dim2"]),
        "timestep": draw.timestep(937.0, batch).to(draw.dtype),
        "visual_rope_pos": [torch.arange(n, device=draw.device) for n in grid],
        "text_rope_pos": torch.arange(text, device=draw.device),
        "scale_factor": (1.0, 2.0, 2.0),
        "sparse_params": None,
        "return_dict": False,
    }


KANDINSKY5_LITE = Preset(
    name="kandinsky5-lite",
    title="Kandinsky 5.0 T2V Lite",
    library="diffusers",
    class_name="Kandinsky5Transformer3DModel",
    config={
        "in_visual_dim": 16,
        "in_text_dim": 3584,
        "in_text_dim2": 768,
        "time_dim": 512,
        "out_visual_dim": 16,
        "patch_size": (1, 2, 2),
        "model_dim": 1792,
        "ff_dim": 7168,
        "num_text_blocks": 2,
        "num_visual_blocks": 32,
        "axes_dims": (16, 24, 24),
        "visual_cond": True,
        "attention_type": "regular",
    },
    tiny_config={
        "in_text_dim": 64,
        "in_text_dim2": 64,
        "time_dim": 64,
        "model_dim": 128,
        "ff_dim": 256,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
    },
    sizes={"batch": 1, "frames": 49, "height": 512, "width": 768, "text": 200},
    tiny_sizes={"batch": 1, "frames": 9, "height": 32, "width": 48, "text": 8},
    make_inputs=_kandinsky5,
    what="49 frames of 768×512: 19968 tokens of width 1792, 200 of text",
    pixels=16,
    frames=4,
    depth=("num_visual_blocks", "num_text_blocks"),
)


def _cells(sizes: Sizes, frames: int) -> tuple[int, int, int]:
    """Frames, rows and columns of an autoencoder that shrinks each side by 8."""
    return (sizes["frames"] - 1) // frames + 1, sizes["height"] // 8, sizes["width"] // 8


PRESETS = (
    LTX_VIDEO,
    WAN_1_3B,
    WAN_2_2_14B,
    WAN_2_2_5B,
    COGVIDEOX_5B,
    MOCHI,
    KANDINSKY5_LITE,
)
