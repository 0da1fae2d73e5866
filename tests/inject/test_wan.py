"""Wan: every fusion site is used, and the bits are eager's."""

import pytest
import torch
from everything import share

import kernelwright as kw
from inject.harness import (
    check_exact,
    check_fused,
    fused_sites,
    left_behind,
    programs_of,
    run,
    same,
)
from kernelwright import models

TINY = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "num_layers": 3}


def wan(dtype=torch.float32, **size):
    build = {"tiny": True, "dtype": dtype}
    size = {"frames": 5, "height": 32, "width": 48, "text": 6, **size}
    return models.build("wan-1.3b", **build), models.inputs("wan-1.3b", **build, **size)


def wan_from_image(dtype):
    """Wan 2.1 I2V: the context is the tokens of an image, then 512 of text."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        **TINY,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        image_dim=16,
        added_kv_proj_dim=48,
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.1)
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 4, 6, dtype=dtype),
        "timestep": torch.tensor([900, 900]),
        "encoder_hidden_states": torch.randn(2, 512, 32, dtype=dtype),
        "encoder_hidden_states_image": torch.randn(2, 9, 16, dtype=dtype),
        "return_dict": False,
    }
    return model.to(dtype).eval(), inputs


def places(model):
    blocks = len(model.blocks)
    return {
        "norm + modulate": 1,
        "QK-norm + RoPE": blocks,
        "gate + residual + norm": blocks,
        "QK-norm": blocks,
        "residual + norm + modulate": blocks,
        "gate + residual + norm + modulate": blocks - 1,
        "gate + residual": 1,
        "norm": 1,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_the_bits_of_eager(dtype):
    model, inputs = wan(dtype)
    report = check_exact(model, inputs)
    assert fused_sites(report) == {**places(model), "GELU": len(model.blocks)}


def test_fused_errs_no_more_than_eager():
    model, inputs = wan(torch.bfloat16)
    sites = fused_sites(check_fused(model, inputs))
    blocks = len(model.blocks)
    assert sites == {**places(model), "linear + GELU": blocks, "attention": 2 * blocks}


def test_norms_and_tables_stay_in_float32_beside_bfloat16():
    model, _ = wan(torch.bfloat16)
    block = model.blocks[0]
    assert block.scale_shift_table.dtype == block.norm2.weight.dtype == torch.float32
    assert block.attn1.norm_q.weight.dtype == torch.bfloat16
    assert model.rope.freqs_cos.dtype == torch.float32


def test_guidance_in_one_batch():
    check_exact(*wan(torch.bfloat16, batch=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_timestep_for_every_token(dtype):
    """Wan 2.2 TI2V: temb is [B, S, 6, D]. Programs add the table of a block to it where they use
    it."""
    model, inputs = wan(dtype, batch=2)
    _, _, frames, height, width = inputs["hidden_states"].shape
    inputs["timestep"] = torch.rand(2, frames * (height // 2) * (width // 2)) * 1000
    programs, others = programs_of(check_exact(model, inputs))
    assert set(programs) == {"WanTransformerBlock"}
    assert set(others) <= {"norm", "norm + modulate"}  # those of the model's end
    if dtype != torch.float32:
        check_fused(model, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_cast_whole(dtype):
    """.to() also casts the rotation tables, the modulation tables and the norms."""
    model, inputs = wan()
    model = torch.nn.Module.to(model, dtype)
    inputs = {k: v.to(dtype) if k.endswith("states") else v for k, v in inputs.items()}
    sites = fused_sites(check_exact(model, inputs))
    turned = "QK-norm + RoPE" if dtype == torch.float32 else "RoPE"
    assert sites[turned] == len(model.blocks)
    assert sites["gate + residual + norm + modulate"] == len(model.blocks) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_to_an_image_beside_the_text(dtype):
    model, inputs = wan_from_image(dtype)
    sites = fused_sites(check_exact(model, inputs))
    assert sites["QK-norm"] == len(model.blocks)
    with kw.injected(model):
        given = run(model, inputs)
        inputs["encoder_hidden_states_image"] = inputs["encoder_hidden_states_image"].flip(-1)
        assert not same(given, run(model, inputs))


def test_control_signals_added_between_blocks():
    """VACE runs the same blocks, and adds to what they return."""
    from diffusers import WanVACETransformer3DModel

    torch.manual_seed(0)
    model = WanVACETransformer3DModel(
        **TINY,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        vace_layers=[0, 2],
        vace_in_channels=6,
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 6),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "control_hidden_states": torch.randn(1, 6, 2, 4, 6),
    }
    sites = fused_sites(check_exact(model, inputs))
    assert sites["gate + residual + norm"] == len(model.blocks)


def test_a_model_without_norm_before_the_text():
    from diffusers import WanTransformer3DModel

    model, inputs = wan()
    torch.manual_seed(0)
    config = {**model.config, "cross_attn_norm": False}
    check_exact(WanTransformer3DModel.from_config(config).eval(), inputs)


def test_projections_fused_by_diffusers():
    model, inputs = wan()
    model.fuse_qkv_projections()
    report = check_exact(model, inputs)
    assert "QK-norm" not in report.sites


def test_a_processor_of_ones_own_is_called():
    model, inputs = wan()
    plain = run(model, inputs)
    original = type(model.blocks[0].attn1.processor)

    class Louder(original):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    model.blocks[0].attn1.set_processor(Louder())
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)


def test_a_mask_handed_to_the_attention():
    model, _ = wan()
    attn = model.blocks[0].attn2
    inputs = {
        "hidden_states": torch.randn(1, 5, 256),
        "encoder_hidden_states": torch.randn(1, 7, 256),
        "attention_mask": torch.arange(7)[None] < 4,
    }
    check_exact(attn, inputs)
    with kw.injected(attn):
        masked = run(attn, inputs)
        assert not same(masked, run(attn, {**inputs, "attention_mask": None}))


def first_block():
    model, _ = wan()
    tables = (model.rope.freqs_cos, model.rope.freqs_sin)
    return model.blocks[0], {
        "hidden_states": torch.randn(1, 5, 256),
        "encoder_hidden_states": torch.randn(1, 7, 256),
        "temb": torch.randn(1, 6, 256),
        "rotary_emb": tuple(t[:5].view(1, 5, 1, 128) for t in tables),
    }


def test_a_block_in_float64():
    block, inputs = first_block()
    inputs = {k: v if k == "rotary_emb" else v.double() for k, v in inputs.items()}
    check_exact(block.double(), inputs)


def test_autocast_keeps_its_dtypes():
    """float32 rows plus bfloat16 branches: no kernel adds those."""
    block, inputs = first_block()
    with torch.autocast("cpu", torch.bfloat16):
        report = check_exact(block, inputs)
    for name in ("gate + residual + norm", "residual + norm + modulate", "gate + residual"):
        assert report.sites[name] == {"eager changes the dtype here": 1}


def test_an_adapter_on_the_projections():
    from peft import LoraConfig

    model, inputs = wan()
    plain = run(model, inputs)
    targets = ["to_q", "to_k", "to_out.0", "net.0.proj"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)


def test_the_recipe_was_written_after_this_diffusers():
    from diffusers.models.transformers import transformer_wan

    from kernelwright.inject.recipes.wan import RECIPE

    block, attention = RECIPE.patches
    assert block.is_written_for(transformer_wan.WanTransformerBlock)
    assert attention.is_written_for(transformer_wan.WanAttention)


@pytest.mark.parametrize(
    ("numerics", "whole"),
    share([("exact", True), ("fused", True), ("fused", False), ("exact", False)], 2),
)
def test_compiled(numerics, whole):
    model, inputs = wan()
    kw.inject(model, numerics=numerics)
    expected = run(model, inputs)
    torch._dynamo.reset()
    if whole:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        compiled = model
    result = run(compiled, inputs)
    if numerics == "exact":
        assert same(result, expected)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    kw.restore(model)
    assert left_behind(model) == []
