"""The VAE of LTX-Video: norms over channels with their SiLU, in the tiers that may round."""

import warnings
from functools import partial

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoResnetBlock3d
from everything import share

import kernelwright as kw
from inject.harness import (
    check_exact,
    check_fused,
    check_gradients,
    fused_sites,
    left_behind,
    run,
    same,
)
from kernelwright import models
from kernelwright.inject.fusions.channel_norms import NOT_EXACT
from kernelwright.inject.verify import accuracy
from kernelwright.models import pipeline
from kernelwright.models.weights import random_model
from kernelwright.ops.channel_norm.limits import problem

PLACE = "channel norm + SiLU"
BLOCKS = 12  # of the tiny VAE, half of them in its decoder


def vae(dtype=torch.float32, **changes):
    config = {**pipeline.VAE, **pipeline.TINY_VAE, **changes}
    return random_model(
        "diffusers", "AutoencoderKLLTXVideo", config, dtype=dtype, device="cpu", seed=0
    )


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def sample():
    return drawn(1, 3, 9, 32, 64)


def latents(dtype):
    """A single frame: bfloat16 is slow on a CPU."""
    return {"hidden_states": drawn(1, 16, 1, 2, 2, dtype=dtype)}


def block(channels=8, **config):
    torch.manual_seed(0)
    made = LTXVideoResnetBlock3d(channels, **config).eval()
    for parameter in (made.per_channel_scale1, made.per_channel_scale2):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return made


def video():
    return drawn(2, 8, 3, 5, 6)


@torch.no_grad()
def near_eager(module, *args, call=None, seed=0, **how):
    """Compare a float32 module in `fused` with its own result, at first sight and after it; returns
    the report."""
    call = call or module

    def result():
        torch.manual_seed(seed)
        return call(*args)

    expected = result()
    with kw.injected(module, numerics="fused", **how) as report:
        for _ in range(2):
            got = result()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            assert got.stride() == expected.stride()
    assert not report.problems
    return report


def test_fused_errs_no_more_than_eager():
    report = check_fused(vae(torch.bfloat16).decoder, latents(torch.bfloat16))
    # the LayerNorm of the block with other channels, and the norm before the last convolution
    assert fused_sites(report) == {PLACE: BLOCKS, "norm": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_is_eager_and_says_why_without_a_warning(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_exact(vae(dtype).decoder, latents(dtype))
    assert PLACE not in report.sites
    blocks = [line for line in report.lines if line.kind.endswith("LTXVideoResnetBlock3d")]
    assert {(line.replaced_by, line.left_alone) for line in blocks} == {(None, NOT_EXACT)}


def test_fp8_is_fused_here():
    decoder, inputs = vae(torch.bfloat16).decoder, latents(torch.bfloat16)
    with kw.injected(decoder, numerics="fused"):
        expected = run(decoder, inputs)
    with kw.injected(decoder, numerics="fp8") as report:
        assert same(run(decoder, inputs), expected)
    assert fused_sites(report)[PLACE] == BLOCKS


def test_a_pipeline_has_it_unless_it_is_left_out():
    pipe = models.ltx_pipeline(tiny=True, device="meta")
    count = partial(kw.inspect, pipe, numerics="fused")
    name = "LTXVideoResnetBlock3d"
    assert count().count(name, "vae") == BLOCKS
    assert count(only="vae").count(name) == count(skip="transformer").count(name) == BLOCKS
    assert count(skip="vae").count(name) == count(only="transformer").count(name) == 0
    assert count(only="vae.decoder.*").count(name) == BLOCKS // 2


CONFIGS = {
    "plain": {},
    "other channels": {"out_channels": 16},
    "weights": {"elementwise_affine": True},
    "noise": {"inject_noise": True},
    "timestep": {"timestep_conditioning": True},
    "both": {"timestep_conditioning": True, "inject_noise": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_block(name):
    config = CONFIGS[name]
    temb = torch.randn(2, 32, 1, 1, 1) if config.get("timestep_conditioning") else None
    sites = fused_sites(near_eager(block(**config), video(), temb))
    place = PLACE if temb is None else "channel norm + modulate + SiLU"
    assert sites.pop(place) == 2
    assert sites == ({"norm": 1} if name == "other channels" else {})


def test_noise_of_a_generator_is_drawn_once():
    module = block(inject_noise=True)

    def draw(x):
        return module(x, None, torch.Generator().manual_seed(3))

    near_eager(module, video(), call=draw)


def test_tiles_slices_and_single_frames():
    model = vae()
    model.enable_slicing()
    model.enable_tiling(64, 64, 16, 32, 32, 8)
    model.use_framewise_decoding = True
    z = drawn(2, 16, 3, 3, 2)
    report = near_eager(model, z, call=lambda z: model.decode(z, return_dict=False)[0])
    shapes = {f.inputs for f in report.findings if f.module == "decoder.mid_block.resnets.0"}
    assert len(shapes) > 1  # tiles at the border are smaller
    assert fused_sites(report)[PLACE] == BLOCKS
    assert left_behind(model) == []


def test_the_layout_of_its_convolutions_is_left_to_them():
    """Contiguous channels are rows, so the kernel for rows runs."""
    model = block()
    x = video().contiguous(memory_format=torch.channels_last_3d)
    report = near_eager(model, video(), call=lambda _: model(x))
    assert problem(x) in report.sites[PLACE]
    sites = near_eager(model.norm1, x.movedim(1, -1)).sites
    assert sites == {"norm": {"fused": 1}}


@pytest.mark.parametrize("where", ["norm1", "nonlinearity"])
def test_hooks_see_what_they_saw(where):
    module, seen = block(), []
    getattr(module, where).register_forward_hook(lambda *_: seen.append(1))
    run(module, {"inputs": video()})
    seen_by_eager = len(seen)
    seen.clear()
    report = near_eager(module, video())
    assert len(seen) == seen_by_eager * 3  # eager itself, first sight, and after it
    reasons = [why for fates in report.sites.values() for why in fates if "hook" in why]
    assert len(reasons) == 1


def test_another_activation_and_another_norm_stay():
    silent = block(non_linearity="gelu")
    assert near_eager(silent, video()).sites[PLACE] == {"no kernel for its GELU": 2}
    module = block()
    module.norm2 = torch.nn.LayerNorm(8)
    assert near_eager(module, video()).sites[PLACE]["no kernel for a layer norm of channels"] == 1


def test_autocast_ends_in_the_dtype_of_eager():
    module = block()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(video())
        with kw.injected(module, numerics="fused") as report:
            got = module(video())
            assert got.dtype == expected.dtype
            assert accuracy.error(got, expected) < 2**-7
    assert fused_sites(report) == {PLACE: 2}
    assert not report.problems


def test_dropout_of_a_model_in_training_is_that_of_eager():
    module = block(dropout=0.5).train()
    assert fused_sites(near_eager(module, video())) == {PLACE: 2}


@pytest.mark.parametrize("checkpointing", share([True, False], 2))
def test_a_gradient_step(checkpointing):
    model = vae().train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    check_gradients(model, {"sample": sample()}, numerics="fused")


def test_a_compiled_block_is_whole():
    module = block(timestep_conditioning=True)
    args = video(), torch.randn(2, 32, 1, 1, 1)
    with torch.no_grad(), kw.injected(module, numerics="fused"):
        expected = module(*args)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*args), expected, rtol=1e-5, atol=1e-6)
