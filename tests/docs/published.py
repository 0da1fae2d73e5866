"""Published pipelines without a download: what `from_pretrained` gives to a block of the docs.

A block that loads `FluxPipeline` or `LTXPipeline` gets one of that class with a tiny model, random
weights and few steps, on the GPU where there is one. Everything else runs as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from kernelwright import models
from kernelwright.models.pipeline import byte_tokenizer

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}


@contextmanager
def small_pipelines() -> Iterator[None]:
    """`from_pretrained` of pipelines builds small ones; their moves to a GPU need none."""
    from diffusers import DiffusionPipeline, FluxPipeline, LTXPipeline

    # by default FLUX reads 512 tokens of text
    smaller = {FluxPipeline: {"max_sequence_length": 32}, LTXPipeline: {"num_frames": 9}}
    made = {FluxPipeline: _flux, LTXPipeline: partial(models.ltx_pipeline, tiny=True)}
    with ExitStack() as patches:
        for kind, build in made.items():
            loads = partial(_load, kind.__name__, build)
            patches.enter_context(mock.patch.object(kind, "from_pretrained", loads))
            call = _with_small_sizes(kind.__call__, {**SMALL, **smaller[kind]})
            patches.enter_context(mock.patch.object(kind, "__call__", call))
        if not torch.cuda.is_available():
            stay = mock.patch.object(DiffusionPipeline, "to", lambda pipe, device: pipe)
            patches.enter_context(stay)
        yield


def _load(kind: str, build: Any, name: str, *, torch_dtype: torch.dtype) -> Any:
    assert name.count("/") == 1, f"{kind}.from_pretrained({name!r}) is no name on the Hub"
    pipe = build(dtype=torch_dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _with_small_sizes(call: Any, sizes: dict[str, int]) -> Any:
    def called(pipe: Any, *prompt: Any, **given: Any) -> Any:
        return call(pipe, *prompt, **{**given, **sizes})

    return called


def _flux(dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    transformer = models.build("flux-dev", tiny=True, dtype=dtype)
    config = transformer.config
    words = byte_tokenizer()
    heads = {"num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    pooled = CLIPTextConfig(
        hidden_size=config.pooled_projection_dim,
        vocab_size=len(words),
        max_position_embeddings=words.model_max_length,
        eos_token_id=words.eos_token_id,
        **heads,
    )
    text = T5Config(
        d_model=config.joint_attention_dim,
        d_ff=32,
        d_kv=8,
        num_heads=2,
        num_layers=1,
        vocab_size=len(words),
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=config.in_channels // 4,
        norm_num_groups=4,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae.to(dtype).eval(),
        text_encoder=CLIPTextModel(pooled).to(dtype).eval(),
        tokenizer=words,
        text_encoder_2=T5EncoderModel(text).to(dtype).eval(),
        tokenizer_2=byte_tokenizer(),
        transformer=transformer,
    )
