"""PixArt by its recipe, and DiT, which has the same class of blocks, by programs: every fusion site
is used, and the bits are eager's."""

import pytest
import torch
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, left_behind, run, same
from kernelwright import models

BOTH = pytest.mark.parametrize("name", ["pixart", "dit-xl"])


def made(name, dtype=torch.float32, **size):
    build = {"tiny": True, "dtype": dtype}
    return models.build(name, **build), models.inputs(name, **build, **size)


def places(model):
    """Of PixArt, which has a second attention, whose branch has no gate."""
    blocks = len(model.transformer_blocks)
    inner = {"gate + residual": blocks + 1, "residual + norm + modulate": blocks}
    joint = {"gate + residual + norm + modulate": blocks - 1}
    return {"norm + modulate": 1, "norm": 1, **joint, **inner}


def programs(model, number):
    """Of DiT, so many in each block."""
    blocks = len(model.transformer_blocks)
    names = [f"program {i + 1} of BasicTransformerBlock" for i in range(number)]
    return {"norm": 1, **dict.fromkeys(names, blocks)}


def block(**config):
    """One block of width 64, with inputs for every norm_type."""
    from diffusers.models.attention import BasicTransformerBlock

    torch.manual_seed(0)
    config = {"norm_elementwise_affine": False, **config}
    inputs = {"hidden_states": torch.randn(2, 9, 64), "timestep": torch.tensor([3, 500])}
    if config["norm_type"] == "ada_norm_single":
        inputs["timestep"] = torch.randn(2, 6 * 64)
    else:
        inputs["class_labels"] = torch.tensor([1, 4])
    if config.get("cross_attention_dim"):
        inputs["encoder_hidden_states"] = torch.randn(2, 5, config["cross_attention_dim"])
    return BasicTransformerBlock(64, 2, 32, **config).eval(), inputs


PIXART = {"norm_type": "ada_norm_single", "cross_attention_dim": 32}
DIT = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10}
KINDS = pytest.mark.parametrize("kind", [PIXART, DIT], ids=["pixart", "dit"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_the_bits_of_eager(name, dtype):
    model, inputs = made(name, dtype)
    sites = fused_sites(check_exact(model, inputs))
    if name == "pixart":
        assert sites == {**places(model), "GELU": len(model.transformer_blocks)}
    else:
        assert sites == programs(model, 7)


@BOTH
def test_fused_errs_no_more_than_eager(name):
    model, inputs = made(name, torch.bfloat16)
    blocks = len(model.transformer_blocks)
    sites = fused_sites(check_fused(model, inputs))
    if name == "pixart":
        assert sites == {**places(model), "linear + GELU": blocks, "attention": 2 * blocks}
    else:
        assert sites == programs(model, 6)


@BOTH
def test_one_picture_without_guidance(name):
    check_exact(*made(name, torch.bfloat16, batch=1))


def test_pixart_without_a_mask():
    model, inputs = made("pixart")
    masked = run(model, inputs)
    inputs["encoder_attention_mask"] = None
    assert not same(run(model, inputs), masked)
    check_exact(model, inputs)


def test_the_padding_mask_counts():
    model, inputs = made("pixart")
    with kw.injected(model):
        masked = run(model, inputs)
        inputs["encoder_attention_mask"] = torch.ones_like(inputs["encoder_attention_mask"])
        assert not same(masked, run(model, inputs))


def test_pixart_conditioned_on_its_resolution():
    from diffusers import PixArtTransformer2DModel

    model, inputs = made("pixart")
    torch.manual_seed(0)
    config = {**model.config, "use_additional_conditions": True, "attention_head_dim": 48}
    config["cross_attention_dim"] = 48 * config["num_attention_heads"]
    inputs["added_cond_kwargs"] = {
        "resolution": torch.full((2, 2), 1024.0),
        "aspect_ratio": torch.ones(2, 1),
    }
    check_exact(PixArtTransformer2DModel.from_config(config).eval(), inputs)


@BOTH
def test_another_timestep_with_the_same_shapes(name):
    model, inputs = made(name)
    other = {**inputs, "timestep": inputs["timestep"] - 100}
    expected = run(model, inputs), run(model, other)
    assert not same(*expected)
    with kw.injected(model):
        for _ in range(2):
            assert same(run(model, inputs), expected[0])
            assert same(run(model, other), expected[1])


def test_other_labels_with_the_same_shapes():
    model, inputs = made("dit-xl")
    other = {**inputs, "class_labels": (inputs["class_labels"] + 1) % 10}
    expected = run(model, other)
    with kw.injected(model):
        assert not same(run(model, inputs), expected)
        assert same(run(model, other), expected)


@pytest.mark.parametrize("recipes", [True, False])
@BOTH
def test_random_numbers_are_drawn_as_in_eager_from_the_first_run_on(name, recipes):
    """Labels that DiT drops in training, and dropout of PixArt."""
    model, inputs = made(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25

    def drawn(seed):
        torch.manual_seed(seed)
        return [run(model, inputs) for _ in range(3)]

    expected = drawn(0)
    assert not same(expected[0], expected[1])
    with kw.injected(model, recipes=recipes):
        assert same(drawn(0), expected)
        assert same(drawn(0), expected)


@KINDS
@pytest.mark.parametrize("layout", ["rows", "pixels"])
def test_a_block_alone(kind, layout):
    model, inputs = block(**kind)
    if layout == "pixels":  # the layout of patches from a convolution
        rows = inputs["hidden_states"].transpose(1, 2).contiguous().transpose(1, 2)
        inputs["hidden_states"] = rows
    assert fused_sites(check_exact(model, inputs))["norm + modulate"] == 1


def test_a_block_of_latte_has_no_second_attention():
    model, inputs = block(norm_type="ada_norm_single")
    assert model.attn2 is None
    assert fused_sites(check_exact(model, inputs))["gate + residual + norm + modulate"] == 1


@KINDS
def test_feed_forward_in_chunks(kind):
    model, inputs = block(**kind)
    model.set_chunk_feed_forward(3, dim=1)
    expected = {"QKV in one product", "norm", "norm + modulate", "GEGLU"}
    assert check_exact(model, inputs).sites.keys() <= expected


def test_arguments_for_the_attention():
    model, inputs = block(**PIXART)
    seen = []

    class Listening(type(model.attn1.processor)):
        def __call__(self, *args, note=None, **kwargs):
            seen.append(note)
            return super().__call__(*args, **kwargs)

    model.attn1.set_processor(Listening())
    check_exact(model, {**inputs, "cross_attention_kwargs": {"note": "C"}})
    assert set(seen) == {"C"}


def test_blocks_left_alone_say_why():
    from diffusers.models.attention import BasicTransformerBlock

    placed = BasicTransformerBlock(
        64, 2, 32, positional_embeddings="sinusoidal", num_positional_embeddings=16
    )
    assert kw.inspect(placed).count("BasicTransformerBlock") == 0
    assert "positional embeddings" in str(kw.inspect(placed))


def test_an_adaptive_norm_beside_a_second_attention():
    check_exact(*block(**DIT, cross_attention_dim=32))


def test_a_hook_on_the_adaptive_norm_runs():
    model, inputs = made("dit-xl")
    seen = []
    norm = model.transformer_blocks[1].norm1
    norm.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    check_exact(model, inputs)
    assert seen
    seen.clear()
    with kw.injected(model):
        run(model, inputs)
        seen.clear()
        run(model, inputs)
    assert seen == [5]


@BOTH
def test_an_adapter_on_the_projections(name):
    from peft import LoraConfig, inject_adapter_in_model

    model, inputs = made(name)
    plain = run(model, inputs)
    targets = ["to_q", "to_out.0", "net.0.proj", "norm1.linear"]
    targets = targets if name == "dit-xl" else targets[:-1]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)


def test_the_recipes_were_written_after_this_diffusers():
    from diffusers.models.attention import BasicTransformerBlock

    from kernelwright.inject.recipes import pixart, unet

    for patch in (*pixart.RECIPE.patches, *unet.RECIPE.patches):
        assert patch.is_written_for(BasicTransformerBlock)


@pytest.mark.parametrize(
    ("name", "whole"),
    share([("pixart", True), ("dit-xl", True), ("dit-xl", False), ("pixart", False)], 2),
)
def test_compiled(name, whole):
    model, inputs = made(name)
    kw.inject(model)
    expected = run(model, inputs)
    torch._dynamo.reset()
    if whole:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        compiled = model
        for module in model.transformer_blocks:
            module.compile(fullgraph=True, backend="eager")
    assert same(run(compiled, inputs), expected)
    kw.restore(model)
    assert left_behind(model) == []
