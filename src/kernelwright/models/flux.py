"""Presets of the FLUX family and its relatives. Inputs are those of one denoising step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .preset import Draw, Preset, Sizes

DEPTH = ("num_layers", "num_single_layers")


def _flux(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch = sizes["batch"]
    return {
        **_joint(draw, config, sizes),
        "pooled_projections": draw.normal(batch, config["pooled_projection_dim"]),
        "guidance": draw.timestep(4.0, batch),
        **_two_axes(draw, sizes),
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
    what="1024×1024: 4096 + 512 tokens of width 3072",
    pixels=16,
    depth=DEPTH,
)


def _flux2(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, guided = sizes["batch"], config["guidance_embeds"]
    return {
        **_joint(draw, config, sizes),
        "guidance": draw.timestep(4.0, batch) if guided else None,
        "img_ids": _image_places(draw, sizes).expand(batch, -1, -1),
        "txt_ids": _text_places(draw, sizes).expand(batch, -1, -1),
    }


def _flux2_config(**size: Any) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 128,
        "out_channels": None,
        "attention_head_dim": 128,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "eps": 1e-6,
        **size,
    }


FLUX2_TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (16, 16, 16, 16),
}
FLUX2_SIZES = {"batch": 1, "height": 1024, "width": 1024, "text": 512}
FLUX2_TINY_SIZES = {"batch": 1, "height": 64, "width": 96, "text": 9}

FLUX2_DEV = Preset(
    name="flux2-dev",
    title="FLUX.2-dev",
    library="diffusers",
    class_name="Flux2Transformer2DModel",
    config=_flux2_config(
        num_layers=8,
        num_single_layers=48,
        num_attention_heads=48,
        joint_attention_dim=15360,
        guidance_embeds=True,
    ),
    tiny_config=FLUX2_TINY,
    sizes=FLUX2_SIZES,
    tiny_sizes=FLUX2_TINY_SIZES,
    make_inputs=_flux2,
    what="1024×1024: 4096 + 512 tokens of width 6144",
    pixels=16,
    depth=DEPTH,
)

FLUX2_KLEIN_4B = replace(
    FLUX2_DEV,
    name="flux2-klein-4b",
    title="FLUX.2-klein 4B",
    config=_flux2_config(
        num_layers=5,
        num_single_layers=20,
        num_attention_heads=24,
        joint_attention_dim=7680,
        guidance_embeds=False,
    ),
    what="1024×1024: 4096 + 512 tokens of width 3072",
)

FLUX2_KLEIN_9B = replace(
    FLUX2_DEV,
    name="flux2-klein-9b",
    title="FLUX.2-klein 9B",
    config=_flux2_config(
        num_layers=8,
        num_single_layers=24,
        num_attention_heads=32,
        joint_attention_dim=12288,
        guidance_embeds=False,
    ),
    what="1024×1024: 4096 + 512 tokens of width 4096",
)


def _flux3(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    image = _image_places(draw, sizes).float()
    image[:, 1:3] *= 0.5  # the model was trained on rows and columns of half the distance
    return {
        **_joint(draw, config, sizes),
        "img_ids": image,
        "txt_ids": _text_places(draw, sizes).float(),
    }


FLUX3 = Preset(
    name="flux3",
    title="FLUX.3",
    library="diffusers",
    class_name="Flux3Transformer2DModel",
    config={
        "in_channels": 128,
        "cond_in_channels": 128,
        "num_layers": 5,
        "num_single_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 20480,
        "timestep_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 10000,
        "eps": 1e-6,
        "flow_map": False,
    },
    tiny_config={**FLUX2_TINY, "cond_in_channels": 16},
    # the prompt is padded to a multiple of 80
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 160},
    tiny_sizes=FLUX2_TINY_SIZES,
    make_inputs=_flux3,
    what="1024×1024: 4096 + 160 tokens of width 3072, a timestep for each token",
    pixels=16,
    depth=DEPTH,
)


def _chroma(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, given = sizes["batch"], _joint(draw, config, sizes)
    image = torch.ones(given["hidden_states"].shape[:2], dtype=torch.bool, device=draw.device)
    return {
        **given,
        **_two_axes(draw, sizes),
        "attention_mask": torch.cat([draw.mask(batch, sizes["text"]), image], dim=1),
    }


CHROMA = Preset(
    name="chroma",
    title="Chroma1",
    library="diffusers",
    class_name="ChromaTransformer2DModel",
    config={
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "axes_dims_rope": (16, 56, 56),
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 5120,
        "approximator_layers": 5,
    },
    tiny_config={
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": (8, 28, 28),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 64,
        "approximator_layers": 2,
    },
    sizes={"batch": 1, "height": 1024, "width": 1024, "text": 512},
    tiny_sizes={"batch": 1, "height": 64, "width": 96, "text": 9},
    make_inputs=_chroma,
    what="1024×1024: 4096 + 512 tokens of width 3072, a mask over all pairs",
    pixels=16,
    depth=DEPTH,
)


def _joint(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """What all of them take: tokens of image and text, and a timestep."""
    batch, cells = sizes["batch"], sizes["height"] // 16 * (sizes["width"] // 16)
    return {
        "hidden_states": draw.normal(batch, cells, config["in_channels"]),
        "encoder_hidden_states": draw.normal(batch, sizes["text"], config["joint_attention_dim"]),
        # the models multiply by 1000 in their dtype: a value that stays exact in bfloat16, so that
        # a float32 run gets the same inputs
        "timestep": draw.timestep(500.0, batch).to(draw.dtype) / 1000,
        "return_dict": False,
    }


def _two_axes(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    """Positions (0, row, column) of image tokens, zeros for the text."""
    text = torch.zeros(sizes["text"], 3, device=draw.device, dtype=draw.dtype)
    return {"img_ids": _image_places(draw, sizes)[:, :3].to(draw.dtype), "txt_ids": text}


def _image_places(draw: Draw, sizes: Sizes) -> torch.Tensor:
    """(time, row, column, 0) of each image token."""
    return draw.grid(1, sizes["height"] // 16, sizes["width"] // 16, 1)


def _text_places(draw: Draw, sizes: Sizes) -> torch.Tensor:
    """(0, 0, 0, position) of each text token."""
    return draw.grid(1, 1, 1, sizes["text"])


PRESETS = (FLUX_DEV, FLUX2_DEV, FLUX2_KLEIN_4B, FLUX2_KLEIN_9B, FLUX3, CHROMA)
