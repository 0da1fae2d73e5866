"""Presets of diffusers' models that make a video with its sound.

Inputs are those of one denoising step, at 24 frames a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .preset import Draw, Preset, Sizes

FRAME_RATE = 24


def _ltx2(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    frames, height, width = (
        (sizes["frames"] - 1) // 8 + 1,
        sizes["height"] // 32,
        sizes["width"] // 32,
    )
    hops = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    audio = round(sizes["frames"] / FRAME_RATE * hops)
    widths = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    if config["use_prompt_embeddings"]:  # the model projects the prompt itself
        widths = config["caption_channels"], config["caption_channels"]
    words, heard = (draw.normal(batch, text, width) for width in widths)
    # the connectors put learned registers where the prompt is padded: nothing is masked
    mask = torch.ones(batch, text, dtype=torch.int64, device=draw.device)
    step = draw.timestep(937.5, batch)
    return {
        "hidden_states": draw.normal(batch, frames * height * width, config["in_channels"]),
        "audio_hidden_states": draw.normal(batch, audio, config["audio_in_channels"]),
        "encoder_hidden_states": words,
        "audio_encoder_hidden_states": heard,
        "timestep": step,
        "sigma": step,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": float(FRAME_RATE),
        "audio_num_frames": audio,
        "video_coords": _video_places(draw, config, frames, height, width).repeat(batch, 1, 1, 1),
        "audio_coords": _audio_places(draw, config, audio).repeat(batch, 1, 1, 1),
        "use_cross_timestep": config["cross_attn_mod"],
        "return_dict": False,
    }


def _video_places(draw: Draw, config: Mapping[str, Any], *cells: int) -> Tensor:
    """Where each token begins and ends, in seconds and pixels [1, 3, tokens, 2]."""
    corner = draw.grid(*cells).T.float()
    scale = torch.tensor(config["vae_scale_factors"], device=draw.device)[:, None, None]
    places = torch.stack([corner, corner + 1], dim=-1) * scale
    # the first latent frame stands for one frame, not for eight
    late = config["causal_offset"] - config["vae_scale_factors"][0]
    places[0] = (places[0] + late).clamp(min=0) / FRAME_RATE
    return places[None]


def _audio_places(draw: Draw, config: Mapping[str, Any], tokens: int) -> Tensor:
    """Where each token begins and ends, in seconds [1, 1, tokens, 2]."""
    scale = config["audio_scale_factor"]
    begin = torch.arange(tokens, dtype=torch.float32, device=draw.device)
    hops = torch.stack([begin, begin + 1], dim=-1) * scale + config["causal_offset"] - scale
    return (hops.clip(min=0) * config["audio_hop_length"] / config["audio_sampling_rate"])[
        None, None
    ]


def _ltx2_config(**version: Any) -> dict[str, Any]:
    return {
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": 32,
        "attention_head_dim": 128,
        "cross_attention_dim": 4096,
        "vae_scale_factors": (8, 32, 32),
        "pos_embed_max_pos": 20,
        "base_height": 2048,
        "base_width": 2048,
        "gated_attn": False,
        "cross_attn_mod": False,
        "audio_in_channels": 128,
        "audio_out_channels": 128,
        "audio_patch_size": 1,
        "audio_patch_size_t": 1,
        "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64,
        "audio_cross_attention_dim": 2048,
        "audio_scale_factor": 4,
        "audio_pos_embed_max_pos": 20,
        "audio_sampling_rate": 16000,
        "audio_hop_length": 160,
        "audio_gated_attn": False,
        "audio_cross_attn_mod": False,
        "num_layers": 48,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": 3840,
        "attention_bias": True,
        "attention_out_bias": True,
        "rope_theta": 10000.0,
        "rope_double_precision": True,
        "causal_offset": 1,
        "timestep_scale_multiplier": 1000,
        "cross_attn_timestep_scale_multiplier": 1000,
        "rope_type": "split",
        "use_prompt_embeddings": True,
        "perturbed_attn": False,
        **version,
    }


LTX2_TINY = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "audio_in_channels": 16,
    "audio_out_channels": 16,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
    "num_layers": 2,
    "caption_channels": 48,
}
LTX2_SIZES = {"batch": 2, "frames": 121, "height": 512, "width": 768, "text": 1024}
LTX2_TINY_SIZES = {"batch": 2, "frames": 17, "height": 64, "width": 96, "text": 12}

LTX_2 = Preset(
    name="ltx-2",
    title="LTX-2 19B",
    library="diffusers",
    class_name="LTX2VideoTransformer3DModel",
    config=_ltx2_config(),
    tiny_config=LTX2_TINY,
    sizes=LTX2_SIZES,
    tiny_sizes=LTX2_TINY_SIZES,
    make_inputs=_ltx2,
    what="121 frames of 768×512, batch 2: 6144 tokens of width 4096 and 126 of sound of width "
    "2048, 1024 of text",
    pixels=32,
    frames=8,
)

LTX_2_3 = Preset(
    name="ltx-2.3",
    title="LTX-2.3",
    library="diffusers",
    class_name="LTX2VideoTransformer3DModel",
    config=_ltx2_config(
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        use_prompt_embeddings=False,
        perturbed_attn=True,
    ),
    tiny_config=LTX2_TINY,
    sizes=LTX2_SIZES,
    tiny_sizes=LTX2_TINY_SIZES,
    make_inputs=_ltx2,
    what="as ltx-2, with gated attention and a modulated prompt",
    pixels=32,
    frames=8,
)

# how MiniMax-H3 marks the rows of its sequence
H3_VIDEO, H3_TEXT, H3_AUDIO = range(3)
# its autoencoder makes five latents of 17 frames: one of the first, and one of every other four
H3_FRAMES = (1, 4, 4, 4, 4)
H3_AUDIO_RATE = 40  # latents a second, and as many units of time in its positions
H3_SPAN = 32  # units of space along the side of a square picture


def _minimax_h3(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text = sizes["batch"], sizes["text"]
    frames = (sizes["frames"] - 5) // 17 * 5 + 2
    rows, columns = sizes["height"] // 32, sizes["width"] // 32
    sound = round(sizes["frames"] / FRAME_RATE * H3_AUDIO_RATE)
    counts = text, 2 * sound, frames * rows * columns  # the order in the sequence; stereo
    words, heard, seen = torch.arange(sum(counts), device=draw.device).split(counts)
    tags = [
        torch.full((n,), tag) for n, tag in zip(counts, (H3_TEXT, H3_AUDIO, H3_VIDEO), strict=True)
    ]
    patch = config["in_channels"] * math.prod(config["patch_size"])
    places = _h3_places(text, sound, frames, rows, columns)
    return {
        "hidden_states": draw.normal(batch, counts[2], patch).float(),
        "audio_hidden_states": draw.normal(batch, counts[1], config["audio_in_channels"]).float(),
        "encoder_hidden_states": draw.normal(batch, text, config["text_dim"]),
        # sound has a schedule of its own; the text takes the step of the video
        "timestep": torch.tensor([0.5, 0.625], device=draw.device),
        "timestep_indices": (torch.cat(tags) == H3_AUDIO).long().to(draw.device),
        "token_tags": torch.cat(tags).to(draw.device),
        "position_ids": places.to(draw.device),
        "video_indices": seen,
        "audio_indices": heard,
        "text_indices": words,
        "return_dict": False,
    }


def _h3_places(text: int, sound: int, frames: int, rows: int, columns: int) -> Tensor:
    """(time, height, width) of text, then the left and the right sound, then video, in float64."""
    steps = torch.tensor([H3_FRAMES[n % 5] for n in range(frames)], dtype=torch.float64)
    ends = (steps * (H3_AUDIO_RATE / FRAME_RATE)).cumsum(0)
    times = text + torch.cat([ends.new_zeros(1), ends[:-1]])
    side = math.sqrt(rows * columns)
    down, across = (
        H3_SPAN * ((1 - n / side) / 2 + torch.arange(n, dtype=torch.float64) / side)
        for n in (rows, columns)
    )
    words = torch.zeros(text, 3, dtype=torch.float64)
    words[:, 0] = torch.arange(text)
    # sound is at the left and the right edge of the picture, and has no height
    beats, edges = text + torch.arange(sound, dtype=torch.float64), across[[0, -1]]
    heard = torch.zeros(2 * sound, 3, dtype=torch.float64)
    heard[:, 0], heard[:, 2] = beats.repeat(2), edges.repeat_interleave(sound)
    return torch.cat([words, heard, torch.cartesian_prod(times, down, across)])


MINIMAX_H3 = Preset(
    name="minimax-h3",
    title="MiniMax-H3",
    library="diffusers",
    class_name="MiniMaxH3Transformer3DModel",
    config={
        "num_attention_heads": 56,
        "attention_head_dim": 128,
        "hidden_size": 5376,
        "num_layers": 50,
        "num_refiner_layers": 2,
        "ffn_dim": 14336,
        "in_channels": 24,
        "audio_in_channels": 32,
        "patch_size": (1, 2, 2),
        "text_dim": 5120,
        "freq_dim": 256,
        "time_embed_hidden_dim": 5376,
        "time_embed_dim": 2688,
        "rope_freq_dim": 16,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "qk_norm_eps": 1e-5,
        "final_norm_eps": 1e-5,
    },
    tiny_config={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "hidden_size": 96,  # narrower than its heads together, as in the full one
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": 256,
        "in_channels": 8,
        "audio_in_channels": 8,
        "text_dim": 64,
        "freq_dim": 64,
        "time_embed_hidden_dim": 96,
        "time_embed_dim": 48,
        "rope_freq_dim": 8,
    },
    sizes={"batch": 1, "frames": 124, "height": 768, "width": 1344, "text": 256},
    tiny_sizes={"batch": 1, "frames": 5, "height": 64, "width": 96, "text": 9},
    make_inputs=_minimax_h3,
    what="124 frames of 1344×768: 37296 tokens of width 5376, 414 of sound and 256 of text in one "
    "sequence",
    pixels=32,
    frames=17,
    first_frames=5,
    depth=("num_layers", "num_refiner_layers"),
)


def _kandinsky6(draw: Draw, config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    batch, text, frames = sizes["batch"], sizes["text"], (sizes["frames"] - 1) // 4 + 1
    cells = frames, sizes["height"] // 8, sizes["width"] // 8
    latents = draw.normal(batch, *cells, config["in_visual_dim"])
    # no picture is given: its latents and its mask are zeros
    picture = latents.new_zeros(batch, *cells, config["in_visual_dim"] + 1)
    sound = math.ceil(sizes["frames"] / FRAME_RATE * 44100 / 1024)
    return {
        "hidden_states": torch.cat([latents, picture], dim=-1),
        "encoder_hidden_states": draw.normal(batch, text, config["in_text_dim"]),
        "pooled_projections": draw.normal(batch, config["in_text_dim2"]),
        "timestep": draw.timestep(937.5, batch),
        "audio_hidden_states": draw.normal(batch, sound, config["in_audio_dim"]),
        "visual_rope_pos": None,
        "encoder_attention_mask": None,  # one prompt is not padded
        "visual_token_type_ids": None,
        "return_dict": False,
    }


KANDINSKY6 = Preset(
    name="kandinsky6",
    title="Kandinsky 6.0 Pro",
    library="diffusers",
    class_name="Kandinsky6Transformer3DModel",
    config={
        "in_visual_dim": 16,
        "out_visual_dim": 16,
        "in_text_dim": 3584,
        "in_text_dim2": 768,
        "time_dim": 1024,
        "patch_size": (1, 2, 2),
        "model_dim": 4096,
        "ff_dim": 16384,
        "num_text_blocks": 4,
        "num_visual_blocks": 60,
        "axes_dims": (32, 48, 48),
        "visual_cond": True,
        "in_audio_dim": 20,
        "out_audio_dim": 20,
        "scale_factor": (1.0, 2.0, 2.0),
        # the released models have these four on, unlike the defaults of the class
        "text_token_padding": True,
        "ca_rope": True,
        "cross_gates": True,
        "fix_modulation": True,
    },
    tiny_config={
        "in_text_dim": 64,
        "in_text_dim2": 64,
        "time_dim": 64,
        "model_dim": 128,
        "ff_dim": 256,
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": (16, 24, 24),
    },
    sizes={"batch": 1, "frames": 121, "height": 512, "width": 768, "text": 200},
    tiny_sizes={"batch": 1, "frames": 9, "height": 32, "width": 48, "text": 8},
    make_inputs=_kandinsky6,
    what="121 frames of 768×512: 47616 tokens of width 4096, 218 of sound, 200 of text",
    pixels=16,
    frames=4,
    depth=("num_visual_blocks", "num_text_blocks"),
)

PRESETS = (LTX_2, LTX_2_3, MINIMAX_H3, KANDINSKY6)
