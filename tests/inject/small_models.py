"""Every transformer of the installed diffusers, small, with inputs for it.

The classes are those that diffusers has. A preset of kernelwright is taken where there is one. For
the others the constructor's arguments get small values by their names, and the inputs of `forward`
are drawn by theirs; `OWN` says what a class wants otherwise.
"""

import inspect

import diffusers.models.transformers as library
import torch
from diffusers import ModelMixin

from inject.language import model_of, words
from kernelwright import models
from kernelwright.models.weights import random_model

HEADS, HEAD, TOKENS, CHANNELS, FRAMES, SIDE = 2, 16, 6, 4, 2, 8
WIDTH = HEADS * HEAD
AXES = (4, 6, 6)  # of rotary embeddings: HEAD in three parts

# arguments of constructors; widths are all the same, so that they fit each other
SIZES = {
    **dict.fromkeys(("num_layers", "num_single_layers", "num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_refiner_layers", "mmdit_layers", "dit_depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(("num_key_value_attention_heads", "dit_heads"), HEADS),
    **dict.fromkeys(("num_cross_attention_heads", "face_encoder_num_heads"), HEADS),
    **dict.fromkeys(("attention_head_dim", "head_dim", "cross_attention_head_dim"), HEAD),
    **dict.fromkeys(("in_channels", "out_channels", "io_channels", "latent_dim"), CHANNELS),
    **dict.fromkeys(("hidden_size", "dim", "embed_dim", "dit_dim", "d_model"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ff_inner_dim", "d_ff"), WIDTH),
    **dict.fromkeys(("ffn_hidden_size", "text_dim", "text_in_dim", "text_encoder_dim"), WIDTH),
    **dict.fromkeys(("text_embed_dim", "text_emb_dim", "dit_text_dim", "context_in_dim"), WIDTH),
    **dict.fromkeys(("time_embed_dim", "joint_attention_dim", "cross_attention_dim"), WIDTH),
    **dict.fromkeys(("cross_attention_dim_t5", "caption_channels", "embedding_dim"), WIDTH),
    **dict.fromkeys(("pooled_projection_dim", "condition_dim", "freq_dim"), WIDTH),
    **dict.fromkeys(("adaln_lora_dim", "fourier_embedding_dim", "cond_token_dim"), WIDTH),
    **dict.fromkeys(("global_cond_dim", "cross_attention_input_dim", "time_proj_dim"), WIDTH),
    **dict.fromkeys(("global_states_input_dim", "timestep_features_dim"), WIDTH),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "rope_dim_list", "rope_dim"), AXES),
    **dict.fromkeys(("sample_size", "sample_height", "sample_width"), SIDE),
    **dict.fromkeys(("text_len", "text_len_t5", "max_text_seq_length"), TOKENS),
    **dict.fromkeys(("num_embeddings", "num_embeds_ada_norm"), TOKENS),
    "sample_frames": 5,
    "norm_num_groups": 2,
    "rope_max_seq_len": 32,
    "vocab_size": 64,
    "rotary_dim": 8,
}


def classes():
    """The names of the transformers that the installed diffusers has."""
    found = (name for name in dir(library) if inspect.isclass(getattr(library, name)))
    return sorted(name for name in found if issubclass(getattr(library, name), ModelMixin))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def positions(count):
    return torch.arange(3 * count).view(count, 3).float() % 5


def latents(name, config):
    """Pixels, frames of pixels or tokens, as the name of a class has it."""
    channels = config.get("in_channels", config.get("io_channels", CHANNELS))
    if "3D" in name:
        return drawn(1, channels, FRAMES, SIDE, SIDE)
    if "2D" in name:
        return drawn(1, channels, SIDE, SIDE)
    return drawn(1, channels, SIDE)


def tokens(config):
    return drawn(1, SIDE, config["in_channels"])


# arguments of forwards
GIVEN = {
    "timestep": torch.tensor([500.0]),
    **{f"encoder_hidden_states{more}": drawn(1, TOKENS, WIDTH) for more in ("", "_t5")},
    **dict.fromkeys(("pooled_projections", "pooled_embeds"), drawn(1, WIDTH)),
    "global_hidden_states": drawn(1, WIDTH),
    **dict.fromkeys(("img_ids",), positions(SIDE)),
    **dict.fromkeys(("txt_ids",), positions(TOKENS)),
    **dict.fromkeys(("original_size", "target_size"), torch.tensor([[64, 64]])),
    "crop_coords": torch.tensor([[0, 0]]),
    "return_dict": False,
}


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % 7


def ones(*shape):
    return torch.ones(shape)


def video(channels, frames=FRAMES):
    return drawn(1, channels, frames, SIDE, SIDE)


# what a class wants otherwise: arguments of its constructor, arguments of its forward
OWN = {
    "AceStepTransformer1DModel": (
        {"in_channels": 24, "audio_acoustic_hidden_dim": 8},
        {
            "hidden_states": drawn(1, SIDE, 8),
            "timestep_r": torch.tensor([250.0]),
            "context_latents": drawn(1, SIDE, 16),
        },
    ),
    "AnyFlowFARTransformer3DModel": (
        {},
        {
            "hidden_states": drawn(1, 4, CHANNELS, SIDE, SIDE),
            **dict.fromkeys(("timestep", "r_timestep"), drawn(1, 4).abs() * 500),
            "chunk_partition": [2, 2],
        },
    ),
    "AnyFlowTransformer3DModel": (
        {},
        {
            "hidden_states": drawn(1, FRAMES, CHANNELS, SIDE, SIDE),
            **dict.fromkeys(("timestep", "r_timestep"), drawn(1, FRAMES).abs() * 500),
        },
    ),
    "BriaFibo2Transformer2DModel": (
        {
            **{"n_layers": 3, "n_refiner_layers": 1, "n_heads": HEADS, "cap_feat_dim": WIDTH},
            **{"injection_layer_ids": (0,), "perceiver_num_layers": 1, "axes_dims": AXES},
            **{"min_num_gist_tokens": 2, "max_num_gist_tokens": 4, "gist_step": 2},
            **{"gist_min_text_len": 2, "gist_max_text_len": 8, "axes_lens": (32, 32, 32)},
        },
        {"encoder_hidden_states": drawn(1, 2, TOKENS, WIDTH), "timestep": torch.tensor([0.5])},
    ),
    "BriaFiboTransformer2DModel": (
        {"joint_attention_dim": 2 * WIDTH},
        {
            "encoder_hidden_states": drawn(1, TOKENS, 2 * WIDTH),
            "text_encoder_layers": [drawn(1, TOKENS, WIDTH, seed=i) for i in range(4)],
        },
    ),
    "ConsisIDTransformer3DModel": (
        {
            **{"is_train_face": True, "cross_attn_interval": 1, "cross_attn_dim_head": HEAD},
            **{"cross_attn_num_heads": HEADS, "LFE_id_dim": 8, "LFE_vit_dim": 8, "LFE_depth": 5},
            **{"LFE_dim_head": HEAD, "LFE_num_heads": HEADS, "LFE_num_id_token": 1},
            **{"LFE_num_querie": 1, "LFE_output_dim": 21, "LFE_ff_mult": 1, "LFE_num_scale": 1},
        },
        {
            "hidden_states": drawn(1, FRAMES, CHANNELS, SIDE, SIDE),
            "id_vit_hidden": [drawn(1, 2, 8)],
            "id_cond": drawn(1, 8),
        },
    ),
    "Cosmos3OmniTransformer": (
        {
            **{"latent_channel": 2, "latent_patch_size": 1, "patch_latent_dim": 2},
            **{"num_key_value_heads": 1, "rope_axes_dim": [4, 2, 2]},
        },
        {
            **{"input_ids": ids(2), "text_indexes": ids(2), "position_ids": ids(3, 3)},
            **{"und_len": 2, "sequence_length": 3, "vision_tokens": [drawn(1, 2, 1, 1, 1)]},
            **{"vision_token_shapes": [(1, 1, 1)], "vision_timesteps": drawn(1)},
            **dict.fromkeys(
                ("vision_sequence_indexes", "vision_mse_loss_indexes"), torch.tensor([2])
            ),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
        },
    ),
    "CosmosTransformer3DModel": (
        {"concat_padding_mask": False, "max_size": (4, 32, 32)},
        {"fps": 24, "attention_mask": ones(1, TOKENS)},
    ),
    "EasyAnimateTransformer3DModel": ({"patch_size": 2}, {"encoder_hidden_states_t5": None}),
    "ErnieImageTransformer2DModel": (
        {},
        {"text_bth": drawn(1, TOKENS, WIDTH), "text_lens": torch.tensor([TOKENS])},
    ),
    "GlmImageTransformer2DModel": (
        {"prior_vq_quantizer_codebook_size": 64},
        {"prior_token_id": ids(1, 16), "prior_token_drop": torch.tensor([False])},
    ),
    "HiDreamImageTransformer2DModel": (
        {
            **{"patch_size": 2, "caption_channels": [WIDTH, WIDTH], "llama_layers": (0, 1)},
            **{"num_routed_experts": 2, "num_activated_experts": 2, "max_resolution": (16, 16)},
            **{"num_layers": 1, "num_single_layers": 1},
            "force_inference_output": True,
        },
        {
            "hidden_states": drawn(1, CHANNELS, 16, 16),
            "timesteps": torch.tensor([500]),
            "encoder_hidden_states_llama3": drawn(2, 1, TOKENS, WIDTH),
        },
    ),
    "HunyuanDiT2DModel": (
        {"patch_size": 2},
        {
            **dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), ones(1, TOKENS)),
            **{"image_meta_size": ones(1, 6), "style": torch.tensor([0])},
            "image_rotary_emb": (drawn(16, HEAD), drawn(16, HEAD, seed=1)),
        },
    ),
    "HunyuanImageTransformer2DModel": (
        {"patch_size": (1, 1), "rope_axes_dim": (8, 8)},
        {"encoder_attention_mask": ones(1, TOKENS)},
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        {"has_image_proj": True, "image_proj_dim": WIDTH, "has_clean_x_embedder": True},
        {
            **{"guidance": torch.tensor([1000]), "image_embeds": drawn(1, TOKENS, WIDTH)},
            **{"indices_latents": ids(FRAMES), "encoder_attention_mask": ones(1, TOKENS)},
            **{"latents_clean": video(CHANNELS), "indices_latents_clean": ids(2)},
            **{"latents_history_2x": video(CHANNELS), "indices_latents_history_2x": ids(2)},
            **{"latents_history_4x": video(CHANNELS, 4), "indices_latents_history_4x": ids(4)},
        },
    ),
    "JoyImageEditPlusTransformer3DModel": (
        {},
        {"hidden_states": drawn(1, 2, CHANNELS, 1, 2, 2), "shape_list": [[(1, 1, 1), (1, 1, 1)]]},
    ),
    "Kandinsky6SRTransformer3DModel": (
        {
            **{"in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS, "time_dim": WIDTH},
            **{"model_dim": WIDTH, "ff_dim": WIDTH, "num_visual_blocks": 2, "axes_dims": AXES},
            "nabla_window": (1, 1, 1),
        },
        {"hidden_states": drawn(1, FRAMES, SIDE, SIDE, 2 * CHANNELS + 1)},
    ),
    "LatteTransformer3DModel": (
        {
            **{"patch_size": 2, "video_length": FRAMES},
            **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False},
        },
        {},
    ),
    "LongCatAudioDiTTransformer": (
        {"text_conv": False},
        {
            "hidden_states": drawn(1, SIDE, CHANNELS),
            "encoder_attention_mask": ones(1, TOKENS).bool(),
            "attention_mask": ones(1, SIDE).bool(),
        },
    ),
    "LuminaNextDiT2DModel": (
        {"num_kv_heads": HEADS, "multiple_of": 16, "learn_sigma": False},
        {
            "encoder_mask": ones(1, TOKENS),
            "image_rotary_emb": torch.polar(ones(16, 16, 8), drawn(16, 16, 8)),
            "cross_attention_kwargs": {},
        },
    ),
    "MiniMaxMusic3RVQDepthDecoder": ({}, {"inputs_embeds": drawn(1, TOKENS, WIDTH)}),
    "MiniMaxMusic3Transformer1DModel": ({}, {"encoder_hidden_states": drawn(1, SIDE, WIDTH)}),
    "NucleusMoEImageTransformer2DModel": (
        {
            **{"in_channels": 16, "num_attention_heads": 4, "moe_enabled": False},
            "capacity_factors": [8.0, 8.0],
        },
        {"hidden_states": drawn(1, 16, 16), "img_shapes": [(1, 4, 4)]},
    ),
    "OmniGenTransformer2DModel": (
        {
            **{"pad_token_id": 0, "time_step_dim": 4},
            "rope_scaling": {"long_factor": [1] * 8, "short_factor": [1] * 8},
        },
        {
            **{"input_ids": ids(1, 24), "input_img_latents": [drawn(1, CHANNELS, SIDE, SIDE)]},
            **{"input_image_sizes": {0: [[0, 16]]}, "attention_mask": ones(1, 41, 41)},
            "position_ids": torch.arange(41)[None],
        },
    ),
    "PRXTransformer2DModel": ({"axes_dim": [8, 8]}, {}),
    "PriorTransformer": (
        {},
        {"hidden_states": drawn(1, WIDTH), "proj_embedding": drawn(1, WIDTH, seed=1)},
    ),
    "StableAudio3DiTModel": ({}, {"hidden_states": drawn(1, CHANNELS, SIDE)}),
    "T5FilmDecoder": (
        {"input_dims": WIDTH, "targets_length": SIDE, "d_kv": HEAD},
        {
            "encodings_and_masks": [(drawn(1, TOKENS, WIDTH), ones(1, TOKENS))],
            "decoder_input_tokens": drawn(1, SIDE, WIDTH),
            "decoder_noise_time": torch.tensor([0.5]),
        },
    ),
    "Transformer2DModel": ({"num_embeds_ada_norm": None, "patch_size": None}, {}),
    "TransformerTemporalModel": (
        {"cross_attention_dim": None},
        {"hidden_states": drawn(2, CHANNELS, SIDE, SIDE), "encoder_hidden_states": None},
    ),
    "WanAnimateTransformer3DModel": (
        {
            **{"in_channels": 12, "latent_channels": CHANNELS, "image_dim": WIDTH},
            **{"motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_dim": 4},
            **{"motion_encoder_size": 16, "motion_style_dim": 8, "motion_encoder_dim": 16},
            **{"face_encoder_hidden_dim": 16, "inject_face_latents_blocks": 2},
        },
        {
            "hidden_states": video(12, 3),
            "encoder_hidden_states_image": drawn(1, TOKENS, WIDTH),
            "pose_hidden_states": video(CHANNELS, 2),
            "face_pixel_values": drawn(1, 3, 5, 16, 16),
        },
    ),
    "WanVACETransformer3DModel": (
        {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 12},
        {"control_hidden_states": video(12)},
    ),
}


# classes without a small model here
LEFT_OUT = {
    "RFD4ProteinaTransformer": "features of proteins",
    "SanaWMLTX2RefinerTransformer3DModel": "a key-value cache of its own",
    "SanaWMTransformer3DModel": "rays of a camera",
    "WanAnimate2Transformer3DModel": "a key-value cache of its own",
}


def config_of(name):
    wanted = inspect.signature(getattr(library, name).__init__).parameters
    return {n: SIZES[n] for n in wanted if n in SIZES} | OWN.get(name, ({}, {}))[0]


def inputs_of(name):
    wanted, config = inspect.signature(getattr(library, name).forward).parameters, config_of(name)
    given = {n: GIVEN[n] for n in wanted if n in GIVEN}
    if "hidden_states" in wanted:
        given["hidden_states"] = tokens(config) if "img_ids" in wanted else latents(name, config)
    return given | OWN.get(name, ({}, {}))[1]


def build(name, layers=1):
    """A small model of a class in float32, with this many layers if it is a preset's, and inputs
    for it."""
    preset = next((p for p in models.presets().values() if p.class_name == name), None)
    if preset is not None:
        small = {"tiny": True, "dtype": torch.float32}
        return preset.build(**small, layers=layers), preset.inputs(**small)
    place = {"dtype": torch.float32, "device": "cpu", "seed": 0}
    return random_model(library.__name__, name, config_of(name), **place), inputs_of(name)


def transformers(layers):
    """Every class that is built here, with its model and inputs."""
    for name in classes():
        if name not in LEFT_OUT:
            yield name, build(name, layers)


LANGUAGE = {
    **{"Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {}, "Gemma2": {"sliding_window": 4}},
    **{"Glm4": {}, "Granite": {}, "Mixtral": {"num_local_experts": 4}, "Olmo2": {}, "Phi3": {}},
    # by default each layer has an embedding of its own, of a quarter of a million words
    "Gemma4": {"sliding_window": 4, "hidden_size_per_layer_input": 0},
}


def language_models(layers):
    """The families of transformers, with a model and inputs."""
    for family, config in LANGUAGE.items():
        yield f"{family}ForCausalLM", (model_of(family, **config), words())
    for preset in ("gemma-3-12b", "falcon-7b"):
        small = {"tiny": True, "dtype": torch.float32}
        model = models.build(preset, **small, layers=layers)
        yield type(model).__name__, (model, models.inputs(preset, **small, tokens=16))
