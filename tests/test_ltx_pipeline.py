"""The LTX-Video pipeline with random weights: the published parts, from prompt to frames."""

import functools

import pytest
import torch
from test_models import shapes

from kernelwright import models
from kernelwright.models import pipeline

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

FRAMES = {"num_frames": 9, "height": 32, "width": 64}


@functools.cache
def pipe():
    made = models.ltx_pipeline(tiny=True, dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


def frames(made, prompt):
    generator = torch.Generator().manual_seed(0)
    asked = {"num_inference_steps": 2, "max_sequence_length": 32, "output_type": "pt"}
    return made(prompt, generator=generator, **asked, **FRAMES).frames


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_t5_is_cast_as_transformers_casts_it(dtype, tmp_path):
    """Its `wo` stays in float32, but only if the model is in float16."""
    pipe().text_encoder.save_pretrained(tmp_path)
    cast = models.ltx_pipeline(tiny=True, dtype=dtype, device="meta").text_encoder
    assert shapes(cast) == shapes(models.load(tmp_path, dtype=dtype))


def test_a_prompt_becomes_frames():
    cat, dog = frames(pipe(), "a cat"), frames(pipe(), "a dog")
    assert cat.shape == (1, 9, 3, 32, 64)
    assert cat.isfinite().all()
    assert cat.std() > 0.05
    assert torch.equal(cat, frames(pipe(), "a cat"))
    assert (cat - dog).abs().mean() > 0.01


def test_the_pipeline_runs_in_bfloat16():
    made = models.ltx_pipeline(tiny=True)
    made.set_progress_bar_config(disable=True)
    assert {p.dtype for p in made.transformer.parameters()} == {torch.bfloat16}
    assert frames(made, "a cat").isfinite().all()


def test_the_full_pipeline_has_the_published_parts():
    made = models.ltx_pipeline(device="meta")
    # google/t5-v1_1-xxl without its decoder
    assert sum(p.numel() for p in made.text_encoder.parameters()) == 4_762_310_656
    assert made.vae_spatial_compression_ratio == 32
    assert made.vae_temporal_compression_ratio == 8
    assert made.tokenizer_max_length == 128
    assert made.text_encoder.config.d_model == made.transformer.config.caption_channels
    assert made.vae.config.latent_channels == made.transformer.config.in_channels


def test_the_tokenizer_pads_as_that_of_t5():
    tokens = pipeline.byte_tokenizer()(
        ["ab", "é"], padding="max_length", max_length=5, return_tensors="pt"
    )
    assert tokens.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert tokens.input_ids[:, 2:].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert len(set(tokens.input_ids[:, :2].flatten().tolist())) == 4


def test_a_saved_pipeline_is_loaded_as_it_was_built(tmp_path):
    pipe().save_pretrained(tmp_path)
    loaded = models.load(tmp_path, dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(frames(loaded, "a cat"), frames(pipe(), "a cat"))
    on_meta = models.load(tmp_path, dtype=torch.float32, device="meta")
    for part in ("transformer", "vae", "text_encoder"):
        assert getattr(on_meta, part).device.type == "meta"
        assert shapes(getattr(on_meta, part)) == shapes(getattr(pipe(), part))
    assert on_meta.tokenizer("a cat").input_ids == pipe().tokenizer("a cat").input_ids
