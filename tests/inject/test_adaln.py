"""Adaptive norms by themselves, as called by models without a recipe."""

import pytest
import torch
from diffusers.models import normalization

from inject.harness import check_exact, check_fused, fused_sites

WIDTH = 128


def adaptive(kind, dtype=torch.bfloat16, **config):
    torch.manual_seed(0)
    continuous = kind == "AdaLayerNormContinuous"
    widths = (WIDTH, WIDTH) if continuous else (WIDTH,)
    norm = getattr(normalization, kind)(*widths, **config).eval()
    for weight in norm.norm.parameters():
        torch.nn.init.normal_(weight)  # ones and zeros would hide whether it is read
    norm = norm.to(dtype)
    rows = "hidden_states" if kind == "SD35AdaLayerNormZeroX" else "x"
    embedding = "conditioning_embedding" if continuous else "emb"
    return norm, {
        rows: torch.randn(2, 40, WIDTH, dtype=dtype),
        embedding: torch.randn(2, WIDTH, dtype=dtype),
    }


KINDS = [
    ("AdaLayerNormZero", {}),
    ("AdaLayerNormZeroSingle", {}),
    ("SD35AdaLayerNormZeroX", {}),
    ("AdaLayerNormContinuous", {}),
    ("AdaLayerNormContinuous", {"norm_type": "rms_norm"}),
]


@pytest.mark.parametrize(("kind", "config"), KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_gives_the_bits_of_eager(kind, config, dtype):
    model, inputs = adaptive(kind, dtype, **config)
    count = 2 if kind == "SD35AdaLayerNormZeroX" else 1
    assert fused_sites(check_exact(model, inputs)) == {"norm + modulate": count}


@pytest.mark.parametrize(("kind", "config"), KINDS, ids=str)
def test_fused_errs_no_more_than_eager(kind, config):
    check_fused(*adaptive(kind, **config))


def test_class_labels():
    model, inputs = adaptive("AdaLayerNormZero", num_embeddings=10)
    del inputs["emb"]
    inputs |= {"timestep": torch.tensor([3, 900]), "class_labels": torch.tensor([1, 10])}
    inputs["hidden_dtype"] = torch.bfloat16
    assert fused_sites(check_exact(model, inputs)) == {"norm + modulate": 1}


def test_a_norm_in_float32_is_rounded_before_it_is_modulated():
    model, inputs = adaptive("AdaLayerNormZero", norm_type="fp32_layer_norm")
    report = check_exact(model, inputs)
    assert "fused" not in report.sites["norm + modulate"]
    assert fused_sites(report) == {"norm": 1}


def test_an_embedding_that_widens_the_result():
    """float32 modulation promotes bfloat16 rows: a kernel must keep that."""
    model, inputs = adaptive("AdaLayerNormZero")
    model.linear.float()
    inputs["emb"] = inputs["emb"].float()
    assert model(**inputs)[0].dtype == torch.float32
    report = check_exact(model, inputs)
    assert "fused" not in report.sites["norm + modulate"]
