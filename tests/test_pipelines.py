"""Pipelines of diffusers, from embeddings of a prompt to the last latents: injected, they give the
latents of eager, for several prompts in turn, with and without graphs."""

import pytest
import torch
from everything import share
from inject.tape import graphs_on_the_cpu

import kernelwright as kw
from kernelwright import models

diffusers = pytest.importorskip("diffusers")

WITHOUT_TEXT = {"text_encoder": None, "tokenizer": None}
# (seed of the prompt and of the latents, steps): graphs are captured, replayed and used again
CALLS = ((1, 3), (2, 2), (1, 2))


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prompts(dim, tokens=12, pooled=None, masks=None):
    """What a pipeline is given instead of a prompt and of a negative prompt, by the first's seed.
    `pooled`: the width of the prompt's pooled embedding; `masks`: the name of the masks, which
    tell how long the prompts are."""

    def of(seed):
        given = {}
        for before, number in (("", seed), ("negative_", 99)):
            given[f"{before}prompt_embeds"] = drawn(1, tokens, dim, seed=number)
            if pooled is not None:
                given[f"{before}pooled_prompt_embeds"] = drawn(1, pooled, seed=number)
            if masks is not None:
                words = torch.arange(tokens)[None] < tokens - number % 5
                given[f"{before}{masks}"] = words.long()
        return given

    return of


def image_vae(kind, channels, **more):
    return kind(latent_channels=channels, block_out_channels=[4], norm_num_groups=1, **more)


def video_vae(kind, channels, **more):
    latents = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    return kind(z_dim=channels, num_res_blocks=1, **latents, **more)


def flux(transformer):
    config = transformer.config
    vae = image_vae(diffusers.AutoencoderKL, config.in_channels // 4)
    second = {"text_encoder_2": None, "tokenizer_2": None}
    given = prompts(config.joint_attention_dim, pooled=config.pooled_projection_dim)
    return diffusers.FluxPipeline, {"vae": vae, **second}, given, {"true_cfg_scale": 2.0}


def flux2(transformer):
    config = transformer.config
    kinds = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    vae = image_vae(diffusers.AutoencoderKLFlux2, config.in_channels // 4, **kinds)

    def given(seed):  # it has no negative prompt
        return {"prompt_embeds": drawn(1, 12, config.joint_attention_dim, seed=seed)}

    return diffusers.Flux2Pipeline, {"vae": vae}, given, {"prompt": None}


def sd3(transformer):
    config = transformer.config
    vae = image_vae(diffusers.AutoencoderKL, config.in_channels)
    others = {f"{kind}_{i}": None for kind in ("text_encoder", "tokenizer") for i in (2, 3)}
    given = prompts(config.joint_attention_dim, pooled=config.pooled_projection_dim)
    how = {"height": 16, "width": 16, "skip_guidance_layers": [0]}
    return diffusers.StableDiffusion3Pipeline, {"vae": vae, **others}, given, how


def qwen_image(transformer):
    config = transformer.config
    vae = video_vae(
        diffusers.AutoencoderKLQwenImage,
        config.in_channels // 4,
        base_dim=8,
        dim_mult=[1, 2],
        temperal_downsample=[False],
    )
    given = prompts(config.joint_attention_dim, masks="prompt_embeds_mask")
    return diffusers.QwenImagePipeline, {"vae": vae}, given, {"true_cfg_scale": 3.0}


def wan(transformer):
    config = transformer.config
    sizes = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}
    vae = video_vae(diffusers.AutoencoderKLWan, config.in_channels, **sizes)
    return diffusers.WanPipeline, {"vae": vae}, prompts(config.text_dim), {"num_frames": 9}


def sana(transformer):
    config = transformer.config
    vae = diffusers.AutoencoderDC(
        latent_channels=config.in_channels,
        attention_head_dim=2,
        encoder_block_types=["ResBlock"],
        decoder_block_types=["ResBlock"],
        encoder_block_out_channels=[8],
        decoder_block_out_channels=[8],
        encoder_qkv_multiscales=[[]],
        decoder_qkv_multiscales=[[]],
        encoder_layers_per_block=[1],
        decoder_layers_per_block=[1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )
    given = prompts(config.caption_channels, masks="prompt_attention_mask")
    how = {"prompt": None, "negative_prompt": None, "use_resolution_binning": False}
    return diffusers.SanaPipeline, {"vae": vae}, given, how


def lumina2(transformer):
    config = transformer.config
    vae = image_vae(diffusers.AutoencoderKL, config.in_channels)
    given = prompts(config.cap_feat_dim, masks="prompt_attention_mask")
    return diffusers.Lumina2Pipeline, {"vae": vae}, given, {"height": 16, "width": 16}


def mochi(transformer):
    config = transformer.config
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=config.in_channels,
        encoder_block_out_channels=[32, 32, 32, 32],
        decoder_block_out_channels=[32, 32, 32, 32],
        layers_per_block=[1, 1, 1, 1, 1],
    )
    of = prompts(config.text_embed_dim, masks="prompt_attention_mask")

    def given(seed):  # its masks are of bools
        return {n: t.bool() if "mask" in n else t for n, t in of(seed).items()}

    return diffusers.MochiPipeline, {"vae": vae}, given, {"num_frames": 7}


PIPELINES = {
    "flux-dev": flux,
    "flux2-dev": flux2,
    "sd3.5-medium": sd3,
    "qwen-image": qwen_image,
    "wan-1.3b": wan,
    "lumina2": lumina2,
    "sana-1.6b": sana,
    "mochi": mochi,
}


@pytest.mark.parametrize("preset", share(PIPELINES, 3, 1))  # mostly those without recipes
def test_an_injected_pipeline_makes_the_latents_of_eager(preset):
    transformer = models.build(preset, tiny=True, dtype=torch.float32, device="cpu")
    kind, parts, given, how = PIPELINES[preset](transformer)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = kind(transformer=transformer, scheduler=scheduler, **WITHOUT_TEXT, **parts)
    pipeline.set_progress_bar_config(disable=True)

    def latents():
        as_latents = {"output_type": "latent", "return_dict": False, "height": 32, "width": 32}
        return [
            pipeline(
                **{**as_latents, **how, **given(seed)},
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
            )[0]
            for seed, steps in CALLS
        ]

    expected = latents()
    assert not torch.equal(expected[0], expected[1])
    with kw.injected(pipeline) as report:
        assert all(map(torch.equal, latents(), expected))
    assert report.replaced
    with graphs_on_the_cpu(), kw.injected(pipeline, graphs=True) as report:
        assert all(map(torch.equal, latents(), expected))
        assert all(graphs.captured for graphs in report.graphs)
    assert all(map(torch.equal, latents(), expected))
