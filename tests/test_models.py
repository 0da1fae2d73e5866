"""Presets equal the published models except for their weights, which hide no mistake."""

import dataclasses
import doctest
import functools
import json
import re

import pytest
import torch
from everything import share
from torch import nn

from kernelwright import models
from kernelwright.models import catalog, loading, pipeline

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

NAMES = list(models.presets())
DTYPES = [torch.float32, torch.bfloat16]

# parameter counts of these published checkpoints
PARAMETERS = {
    "ltx-video": 1_923_385_472,  # Lightricks/LTX-Video
    "wan-1.3b": 1_418_996_800,  # Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    "flux-dev": 11_901_408_320,  # black-forest-labs/FLUX.1-dev
    "sd3.5-medium": 2_243_171_520,  # stabilityai/stable-diffusion-3.5-medium, less pos_embed
    "pixart": 610_856_096,  # PixArt-alpha/PixArt-Sigma-XL-2-1024-MS
    "sdxl-unet": 2_567_463_684,  # stabilityai/stable-diffusion-xl-base-1.0
    "llama-3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "mistral-7b": 7_241_732_096,  # mistralai/Mistral-7B-v0.1
    "qwen3-8b": 8_190_735_360,  # Qwen/Qwen3-8B
    "falcon-7b": 7_217_189_760 - 65024 * 4544,  # tiiuae/falcon-7b, which stores its tied head twice
}
# of the others, the sizes that their authors give, in billions; the installed diffusers is all that
# is known of FLUX.3, Qwen-Image 2.1, MiniMax-H3, Krea 2, Ideogram 4 and Kandinsky 6
BILLIONS = {
    "flux2-dev": 32,
    "flux2-klein-4b": 4,
    "flux2-klein-9b": 9,
    "qwen-image": 20,
    "z-image": 6,
    "ltx-2": 19,
    "hunyuan-video": 13,
    "hunyuan-video-1.5": 8.3,
    "wan-2.2-14b": 14,
    "wan-2.2-5b": 5,
    "cogvideox-5b": 5.6,
    "chroma": 8.9,
    "sana-1.6b": 1.6,
    "lumina2": 2.6,
    "auraflow": 6.8,
    "mochi": 10,
    "kandinsky5-lite": 2,
    "gemma-3-12b": 12,
    "gemma-4-31b": 30.7,
    "phi-4": 14.7,
    "phi-3-mini": 3.8,
    "glm-4-9b": 9.4,
}
# they read values of a mask, or use autocast, which the meta device has not
NOT_ON_META = ("qwen-image-2.1", "lumina2", "hunyuan-video-1.5", "mochi", "ideogram-4")
# parameters that these inputs do not reach: the last block computes the text, and drops it
UNREACHED = {
    "sd3.5-medium": r"blocks\.4\.attn\.(add_q_proj|norm_added_q)",
    "mochi": r"blocks\.2\.attn1\.(add_q_proj|norm_added_q)",
    "qwen-image": r"blocks\.1\.(attn\.(add_q_proj|norm_added_q|to_add_out)|txt_mlp)",
    # and there is no picture to begin with
    "hunyuan-video-1.5": r"blocks\.1\.(attn\.(add_q_proj|norm_added_q|to_add_out)|ff_context)|"
    r"image_embedder",
    "flux3": "image_cond",
}


def depths(preset, config):
    return {key: config[key] for key in preset.depth if key in config}


def output(model, inputs):
    with torch.no_grad():
        return first(model(**inputs))


def first(result):
    """The picture or the logits of what a model returns."""
    result = result[0] if isinstance(result, tuple) else getattr(result, "logits", result)
    return torch.stack(result) if isinstance(result, list) else result


@functools.cache
def full(name):
    return models.build(name, device="meta")


@functools.cache
def tiny(name, dtype=torch.float32):
    return models.build(name, tiny=True, dtype=dtype)


def count(model, kind):
    return sum(type(module).__name__ == kind for module in model.modules())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_full_preset_has_the_published_number_of_parameters(name):
    assert sum(p.numel() for p in full(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_a_full_preset_has_the_size_that_its_name_says(name):
    billions = sum(p.numel() for p in full(name).parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.08)


def test_every_full_preset_has_its_size_checked_or_is_built():
    for name in set(NAMES) - set(PARAMETERS) - set(BILLIONS):
        assert all(p.is_meta for p in full(name).parameters())


def test_dit_has_the_published_number_of_parameters():
    """675M in the paper, minus 256 learned positions; diffusers has an embedder in each block."""
    parameters = full("dit-xl").named_parameters()
    once = {
        n: p for n, p in parameters if ".emb." not in n or n.startswith("transformer_blocks.0.")
    }
    assert sum(p.numel() for p in once.values()) == pytest.approx(675e6, rel=0.001)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, preset in models.presets().items()
        if preset.library == "diffusers" and name not in NOT_ON_META
    ],
)
def test_full_inputs_fit_the_full_model(name):
    model = models.build(name, device="meta", layers=1)
    inputs = models.inputs(name, device="meta")
    result = output(model, inputs)
    given = inputs.get("hidden_states", inputs.get("sample"))
    if "out_channels" in model.config and name != "qwen-image":  # which counts those of a pixel
        expected = list(given.shape)
        channels = 2 if given.ndim == 3 or name == "cogvideox-5b" else 1
        expected[channels] = model.config.out_channels or model.config.in_channels
        assert list(result.shape) == expected
    assert result.dtype == torch.bfloat16 or name == "minimax-h3"  # its last layer is in float32


@pytest.mark.parametrize("name", NAMES)
def test_layers_limits_every_kind_of_block(name):
    preset = models.presets()[name]
    whole, some = full(name), models.build(name, device="meta", layers=2)
    for key, count in depths(preset, preset.config).items():
        built = some.config[key] if isinstance(some.config, dict) else getattr(some.config, key)
        if preset.shallow is None:
            limit = tuple(min(n, 2) for n in count) if isinstance(count, tuple) else min(count, 2)
            assert built == limit
    assert {type(m).__name__ for m in some.modules()} == {type(m).__name__ for m in whole.modules()}
    widths = {p.shape for p in whole.parameters()}
    assert {p.shape for p in some.parameters()} <= widths
    assert sum(p.numel() for p in some.parameters()) < sum(p.numel() for p in whole.parameters())


def test_layers_keep_the_kinds_that_differ_in_order():
    sd3 = models.build("sd3.5-medium", device="meta", layers=4)
    assert [b.attn2 is not None for b in sd3.transformer_blocks] == [True] * 4 + [False] * 4
    gemma = models.build("gemma-3-12b", device="meta", layers=4).config
    assert gemma.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    with pytest.raises(ValueError, match="flux-dev: layers is 0, expected 1 or more"):
        models.build("flux-dev", device="meta", layers=0)


def test_positions_are_those_of_the_libraries():
    """LTX-2 and MiniMax-H3 get positions from their pipelines."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    ltx, inputs = tiny("ltx-2"), models.inputs("ltx-2", tiny=True)
    frames, height, width = (inputs[key] for key in ("num_frames", "height", "width"))
    wanted = ltx.rope.prepare_video_coords(2, frames, height, width, "cpu", fps=24.0)
    assert torch.equal(inputs["video_coords"], wanted)
    wanted = ltx.audio_rope.prepare_audio_coords(2, inputs["audio_num_frames"], "cpu")
    assert torch.equal(inputs["audio_coords"], wanted)

    inputs = models.inputs("minimax-h3", tiny=True, frames=22)
    tags = torch.ones(9, dtype=torch.int64)
    wanted = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, 7, 4, 6, 37, (1, 2, 2), 2, 2, 0)
    keys = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    for key, tensor in zip(keys, wanted, strict=False):
        torch.testing.assert_close(inputs[key], tensor, rtol=1e-12, atol=1e-12)


def test_default_sizes_are_those_of_the_pipelines():
    def shape(name, argument):
        return list(models.inputs(name, device="meta")[argument].shape)

    assert shape("ltx-video", "hidden_states") == [2, 7 * 16 * 24, 128]
    assert shape("flux-dev", "hidden_states") == [1, 64 * 64, 64]
    assert shape("flux-dev", "encoder_hidden_states") == [1, 512, 4096]
    assert shape("sd3.5-medium", "encoder_hidden_states") == [2, 77 + 256, 4096]
    assert shape("wan-1.3b", "hidden_states") == [1, 16, 21, 60, 104]
    assert shape("llama-3-8b", "input_ids") == [1, 4096]


def test_the_blocks_of_the_full_models():
    ltx = full("ltx-video")
    norms = [m for m in ltx.modules() if type(m).__name__ == "RMSNorm"]
    assert count(ltx, "LTXVideoTransformerBlock") == 28
    assert count(ltx, "LTXAttention") == 56
    assert sum(norm.weight is None for norm in norms) == 56
    assert sum(norm.weight is not None for norm in norms) == 112
    assert count(full("flux-dev"), "FluxTransformerBlock") == 19
    assert count(full("flux-dev"), "FluxSingleTransformerBlock") == 38
    assert sum(b.attn2 is not None for b in full("sd3.5-medium").transformer_blocks) == 13
    # two in each block, two in its attention, and the last one
    assert count(full("qwen3-8b"), "Qwen3RMSNorm") == 36 * 4 + 1


def test_the_tiny_models_have_every_kind_of_block_twice():
    assert count(tiny("flux-dev"), "FluxTransformerBlock") == 2
    assert count(tiny("flux-dev"), "FluxSingleTransformerBlock") == 2
    assert tiny("flux-dev").time_text_embed.guidance_embedder is not None
    dual = [b.attn2 is not None for b in tiny("sd3.5-medium").transformer_blocks]
    assert dual == [True, True, False, False, False]
    assert {len(t.transformer_blocks) for t in tiny("sdxl-unet").mid_block.attentions} == {2}
    for name in ("llama-3-8b", "mistral-7b", "qwen3-8b"):
        config = tiny(name).config
        assert config.num_attention_heads == 2 * config.num_key_value_heads
    falcon = tiny("falcon-7b").config
    assert falcon.multi_query
    assert falcon.parallel_attn
    assert not falcon.new_decoder_architecture


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, d) for n, name in enumerate(NAMES) for d in share(DTYPES, 2, start=n)],
)
def test_a_tiny_forward_is_of_sane_scale(name, dtype):
    result = output(tiny(name, dtype), models.inputs(name, tiny=True, dtype=dtype)).float()
    assert result.isfinite().all()
    assert 0.2 < result.std() < 8
    assert result.abs().max() < 80


# those that have the blocks of another; Llama and Mistral those of Qwen3 without its norms
SAME_BLOCKS = ("llama-3-8b", "mistral-7b", "wan-2.2-14b", "wan-2.2-5b")
SAME_BLOCKS += ("flux2-klein-4b", "flux2-klein-9b", "ltx-2", "phi-4")


@pytest.mark.parametrize("name", share((n for n in NAMES if n not in SAME_BLOCKS), 2))
def test_activations_neither_grow_nor_fade_with_depth(name):
    preset = models.presets()[name]
    config = {**preset.tiny_config, **depths(preset, preset.config)}
    deep = dataclasses.replace(preset, tiny_config=config)
    model = deep.build(tiny=True, dtype=torch.float32, layers=12)
    residuals = []

    def keep(module, args, result):
        results = result if isinstance(result, tuple) else (result,)
        residuals.extend(r for r in results if isinstance(r, torch.Tensor))

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 3:
            for block in module:
                block.register_forward_hook(keep)
    output(model, deep.inputs(tiny=True, dtype=torch.float32))
    assert len(residuals) >= 12
    for residual in residuals:
        assert 0.3 < residual.std() < 20
        assert residual.abs().max() < 100


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_random_and_reaches_the_output(name):
    model = tiny(name)
    model.zero_grad()
    result = model(**models.inputs(name, tiny=True, dtype=torch.float32))
    # a video has sound too
    both = result if isinstance(result, tuple) and len(result) == 2 else [first(result)]
    sum(part.square().sum() for part in both).backward()
    for path, parameter in model.named_parameters():
        assert parameter.std() > 0, path
        if name in UNREACHED and re.search(UNREACHED[name], path):
            continue
        assert parameter.grad is not None, path
        assert parameter.grad.abs().max() > 0, path
    model.zero_grad()


def test_a_seed_gives_one_model_in_every_dtype():
    def weights(seed, dtype=torch.float32):
        return models.build("flux-dev", tiny=True, dtype=dtype, seed=seed).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    rounded = weights(1, torch.bfloat16)
    for path, weight in first.items():
        assert torch.equal(weight, again[path]), path
        assert not torch.equal(weight, other[path]), path
        assert torch.equal(weight.bfloat16(), rounded[path]), path


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_set_of_inputs(name):
    def tensors(seed):
        inputs = models.inputs(name, tiny=True, seed=seed)
        found = [inputs[k] for k in ("hidden_states", "sample", "input_ids") if k in inputs]
        return found or inputs["x"]

    for first, again, other in zip(tensors(1), tensors(1), tensors(2), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_inputs_do_not_repeat_the_numbers_of_the_weights():
    model = tiny("ltx-video")
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    drawn = inputs["hidden_states"].flatten()
    for path, parameter in model.named_parameters():
        length = min(drawn.numel(), parameter.numel())
        both = torch.stack([drawn[:length], parameter.detach().flatten()[:length]])
        assert length < 64 or torch.corrcoef(both)[0, 1].abs() < 0.5, path


@pytest.mark.parametrize("make", [models.build, models.inputs])
def test_the_state_of_torch_stays_as_it_was(make):
    before = torch.get_rng_state()
    for name in ("ltx-video", "llama-3-8b"):
        make(name, tiny=True)
        make(name, tiny=True, device="meta")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_loaded_as_it_was_built(name, tmp_path):
    """Weights, dtypes and buffers: `build` returns the same as `from_pretrained`."""
    built = tiny(name, torch.bfloat16)
    built.save_pretrained(tmp_path)
    loaded = models.load(tmp_path)
    assert type(loaded) is type(built)
    assert not loaded.training
    assert not built.training
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(built, kind)()), dict(getattr(loaded, kind)())
        assert ours.keys() == theirs.keys()
        for path, tensor in ours.items():
            assert tensor.dtype == theirs[path].dtype, path
            assert torch.equal(tensor, theirs[path]), path
    on_meta = models.load(tmp_path, device="meta")
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    assert shapes(on_meta) == shapes(built)


def shapes(model):
    return {path: (tensor.shape, tensor.dtype) for path, tensor in model.state_dict().items()}


def test_some_modules_of_wan_stay_in_float32():
    kept = {
        n for n, p in tiny("wan-1.3b", torch.bfloat16).named_parameters() if p.dtype.itemsize > 2
    }
    assert "blocks.0.norm2.weight" in kept
    assert "blocks.0.scale_shift_table" in kept
    assert "condition_embedder.time_embedder.linear_1.weight" in kept
    assert not any("attn" in path or "ffn" in path for path in kept)


def test_falcon_has_one_embedding():
    model = tiny("falcon-7b", torch.bfloat16)
    assert model.lm_head.weight is model.transformer.word_embeddings.weight


@pytest.mark.parametrize("name", ["ltx-video", "pixart"])
def test_the_padding_mask_is_real(name):
    inputs = models.inputs(name, tiny=True, dtype=torch.float32)
    mask = inputs["encoder_attention_mask"]
    assert mask.bool().all(dim=1).tolist() == [False, True]
    masked = output(tiny(name), inputs)
    seen = output(tiny(name), inputs | {"encoder_attention_mask": torch.ones_like(mask)})
    assert not torch.allclose(masked[0], seen[0], atol=1e-3)


def test_timesteps_have_the_dtypes_that_pipelines_pass():
    wanted = {
        "ltx-video": torch.float32,
        "flux-dev": torch.bfloat16,
        "sd3.5-medium": torch.float32,
        "wan-1.3b": torch.int64,
        "pixart": torch.int64,
        "dit-xl": torch.int64,
        "sdxl-unet": torch.float32,
    }
    for name, dtype in wanted.items():
        assert models.inputs(name, tiny=True)["timestep"].dtype == dtype, name
    assert models.inputs("flux-dev", tiny=True)["timestep"].max() <= 1


def test_sizes_can_be_chosen():
    inputs = models.inputs("ltx-video", tiny=True, batch=1, frames=25, height=96, width=64, text=5)
    assert inputs["hidden_states"].shape == (1, 4 * 3 * 2, 16)
    assert inputs["encoder_hidden_states"].shape[:2] == (1, 5)
    assert not inputs["encoder_attention_mask"].all()


def test_a_preset_is_loaded_by_name():
    loaded = models.load("dit-xl", tiny=True, dtype=torch.float32)
    assert torch.equal(loaded.proj_out_2.weight, tiny("dit-xl").proj_out_2.weight)


def test_unknown_names_suggest_near_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no preset 'flux'; did you mean .*flux-dev"):
        models.build("flux")
    with pytest.raises(ValueError, match=r"no preset '\?'; `kernelwright models` lists them"):
        models.inputs("?")
    with pytest.raises(ValueError, match=r"'llama-3-8B' is not a preset.*did you mean llama-3-8b"):
        models.load("llama-3-8B")
    with pytest.raises(
        ValueError, match=r"is not a preset.*no model_index.json and no config.json"
    ):
        models.load(tmp_path)


def test_a_hub_that_cannot_be_reached_is_no_crash(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(source, file):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(
        ValueError, match=r"'owner/ltx-video' is not a preset.*or cannot be reached"
    ):
        models.load("owner/ltx-video")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"_class_name": "NoSuchModel"}, "the installed diffusers has no NoSuchModel"),
        ({"architectures": ["NoSuchLM"]}, "the installed transformers has no NoSuchLM"),
        ({"width": 3}, "names no class of diffusers or transformers"),
    ],
)
def test_a_config_of_an_unknown_class_is_an_error(config, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=problem):
        models.load(tmp_path)


def test_wrong_sizes_are_errors(tmp_path):
    with pytest.raises(ValueError, match="ltx-video: height is 500, expected a multiple of 32"):
        models.inputs("ltx-video", height=500)
    with pytest.raises(ValueError, match="llama-3-8b: tokens is 0, expected 1 or more"):
        models.inputs("llama-3-8b", tokens=0)
    with pytest.raises(
        ValueError, match=r"no size 'frames', expected any of \['batch', 'tokens'\]"
    ):
        models.inputs("llama-3-8b", frames=3)
    with pytest.raises(ValueError, match="only presets have a tiny size"):
        models.load(tmp_path, tiny=True)


@pytest.mark.parametrize("module", [catalog, loading, pipeline])
def test_examples_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
