"""The LTX-Video pipeline, with random weights and a byte tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from .catalog import build
from .weights import random_model

PROMPT_TOKENS = 128

VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "block_out_channels": (128, 256, 512, 512),
    "decoder_block_out_channels": (128, 256, 512, 512),
    "layers_per_block": (4, 3, 3, 3, 4),
    "decoder_layers_per_block": (4, 3, 3, 3, 4),
    "spatio_temporal_scaling": (True, True, True, False),
    "decoder_spatio_temporal_scaling": (True, True, True, False),
    "decoder_inject_noise": (False, False, False, False, False),
    "upsample_residual": (False, False, False, False),
    "upsample_factor": (1, 1, 1, 1),
    "timestep_conditioning": False,
    "patch_size": 4,
    "patch_size_t": 1,
    "resnet_norm_eps": 1e-6,
    "scaling_factor": 1.0,
    "encoder_causal": True,
    "decoder_causal": False,
}
TINY_VAE = {
    "latent_channels": 16,
    "block_out_channels": (8, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 16, 16),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}

# T5 v1.1 XXL
TEXT_ENCODER = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
TINY_TEXT_ENCODER = {
    "vocab_size": 384,
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 2,
}

SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def ltx_pipeline(
    *,
    tiny: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Any:
    """diffusers' LTXPipeline with random weights: it turns a prompt into frames of noise.

    It is complete: tokenizer, T5 encoder, transformer, scheduler and autoencoder.

    >>> pipe = ltx_pipeline(tiny=True, dtype=torch.float32)
    >>> size = {"num_frames": 9, "height": 64, "width": 96}
    >>> pipe("a cat", num_inference_steps=2, output_type="np", **size).frames.shape
    (1, 9, 64, 96, 3)
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    def part(library: str, name: str, full: dict[str, Any], small: dict[str, Any], n: int) -> Any:
        config = {**full, **small} if tiny else full
        return random_model(library, name, config, dtype=dtype, device=device, seed=seed + n)

    vae = part("diffusers", "AutoencoderKLLTXVideo", VAE, TINY_VAE, 1)
    if vae.latents_mean.device.type != "meta":
        _draw_statistics(vae, seed + 3)
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=part("transformers", "T5EncoderModel", TEXT_ENCODER, TINY_TEXT_ENCODER, 2),
        tokenizer=byte_tokenizer(),
        transformer=build("ltx-video", tiny=tiny, dtype=dtype, device=device, seed=seed),
    )


def byte_tokenizer() -> Any:
    """A tokenizer with T5's special tokens, and one token per byte of the prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=PROMPT_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )


def _draw_statistics(vae: Any, seed: int) -> None:
    """Draw mean and deviation of the latents: the default zeros and ones would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    shape = vae.latents_mean.shape
    vae.latents_mean.copy_(0.3 * torch.randn(shape, generator=generator, dtype=torch.float32))
    vae.latents_std.copy_(0.5 + torch.rand(shape, generator=generator, dtype=torch.float32))
