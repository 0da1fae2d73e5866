"""The norm over channels on a GPU: any layout, the sizes of LTX-Video's VAE, and the VAE itself."""

import pytest
import torch
from channel_norms import EPS, LAYOUTS, hold, normal, parts
from inject.harness import check_exact, check_fused, fused_sites

from kernelwright.models import pipeline
from kernelwright.models.weights import random_model
from kernelwright.ops.channel_norm import CHANNEL_NORM

PLACE = "channel norm + SiLU"
# [B, C, frames, height, width] in the decoder of 49 frames of 512 x 768, and some odd ones
VIDEOS = [
    (1, 512, 7, 16, 24),
    (2, 512, 13, 32, 48),
    (1, 256, 25, 64, 96),
    (1, 128, 9, 128, 192),
    (1, 1024, 4, 15, 22),
    (1, 130, 3, 15, 23),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [8, 24, 128, 130])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_any_number_of_channels(layout, channels, dtype):
    x = LAYOUTS[layout](channels, dtype=dtype, device="cuda")
    hold(x)
    hold(x, *parts(x, weighted=True, modulation=True))


@pytest.mark.parametrize("shape", VIDEOS, ids=str)
def test_the_videos_of_ltx(shape):
    x = normal(*shape, device="cuda")
    hold(x)
    hold(x, *parts(x, weighted=True, modulation=True))
    hold(x[:, :, 1:])


def test_misaligned_addresses_are_read_right():
    x = normal(1, 128, 2, 16, 24, device="cuda")
    for offset in (1, 2, 4):
        flat = torch.zeros(x.numel() + offset, dtype=x.dtype, device="cuda")
        hold(flat[offset:].view(x.shape).copy_(x))


def test_more_than_two_to_the_31_elements():
    shape = (1, 128, (1 << 24) + 48)
    x = torch.full(shape, 2.0, dtype=torch.bfloat16, device="cuda")
    x[:, :, -40:] = -3.0
    got = CHANNEL_NORM(x, None, None, None, "none", EPS)
    assert (got[:, :, :-40] == 1).all()
    assert (got[:, :, -40:] == -1).all()


def decoder(dtype, **changes):
    config = {**pipeline.VAE, **pipeline.TINY_VAE, **changes}
    how = {"dtype": dtype, "device": "cuda", "seed": 0}
    inputs = {"hidden_states": torch.randn(2, 16, 3, 4, 6, device="cuda").to(dtype)}
    return random_model("diffusers", "AutoencoderKLLTXVideo", config, **how).decoder, inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_errs_no_more_than_eager(dtype):
    assert fused_sites(check_fused(*decoder(dtype))) == {PLACE: 12, "norm": 2}


def test_a_decoder_that_is_told_the_timestep():
    same = (16, 16, 16, 16)
    model, inputs = decoder(
        torch.bfloat16, timestep_conditioning=True, decoder_block_out_channels=same
    )
    inputs["temb"] = torch.tensor([0.05, 0.05], device="cuda", dtype=torch.bfloat16)
    sites = fused_sites(check_fused(model, inputs))
    assert sites["channel norm + modulate + SiLU"] == 10


def test_exact_is_eager():
    assert PLACE not in check_exact(*decoder(torch.bfloat16)).sites
