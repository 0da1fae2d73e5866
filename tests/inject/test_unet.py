"""UNets: every fusion site is used, and the bits are eager's."""

import pytest
import torch
from everything import share

import kernelwright as kw
from inject.harness import check_exact, check_fused, fused_sites, left_behind, run, same
from kernelwright import models

BLOCKS, TRANSFORMERS = 14, 7  # of the tiny SDXL


def sdxl(dtype=torch.float32, **size):
    build = {"tiny": True, "dtype": dtype}
    return models.build("sdxl-unet", **build), models.inputs("sdxl-unet", **build, **size)


def places():
    """The first block of a transformer runs its own norm, the others get normalised rows."""
    joint = 2 * BLOCKS + BLOCKS - TRANSFORMERS
    return {"norm": TRANSFORMERS, "residual + norm": joint, "GEGLU": BLOCKS}


def block(**config):
    from diffusers.models.attention import BasicTransformerBlock

    torch.manual_seed(0)
    model = BasicTransformerBlock(64, 2, 32, **{"cross_attention_dim": 32, **config}).eval()
    inputs = {"hidden_states": torch.randn(2, 9, 64), "encoder_hidden_states": None}
    if model.attn2 is not None:
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 32)
    return model, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_gives_the_bits_of_eager(dtype):
    assert fused_sites(check_exact(*sdxl(dtype))) == places()


def test_blocks_of_convolutions_run_as_they_did():
    report = check_exact(*sdxl())
    (line,) = (str(b) for b in report.blocks if b.kind == "ResnetBlock2D")
    assert line == "ResnetBlock2D: not recorded: little to gain: 6 ops would be 5 kernels"


def test_fused_errs_no_more_than_eager():
    assert fused_sites(check_fused(*sdxl(torch.bfloat16))) == {**places(), "attention": 28}


def test_the_table_counts_every_norm_and_activation():
    report = kw.inspect(models.build("sdxl-unet", device="meta"))
    kinds = ("BasicTransformerBlock", "LayerNorm", "GEGLU")
    assert [report.count(kind) for kind in kinds] == [70, 210, 70]
    left = {line.kind.rpartition(".")[2] for line in report.lines if line.left_alone}
    assert left.isdisjoint(kinds)


def test_projections_by_convolution():
    """SD 1.5 passes its blocks pixels in the layout of its convolutions."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    ).eval()
    inputs = {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(1, 5, 16),
    }
    blocks = kw.inspect(model).count("BasicTransformerBlock")
    sites = fused_sites(check_exact(model, inputs))
    assert sites == {"norm": blocks, "residual + norm": 2 * blocks, "GEGLU": blocks}


def test_a_padded_prompt():
    model, inputs = sdxl()
    plain = run(model, inputs)
    mask = torch.ones(inputs["encoder_hidden_states"].shape[:2])
    mask[:, 3:] = 0
    inputs["encoder_attention_mask"] = mask
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)


CONFIGS = {
    "plain": {},
    "without a text": {"cross_attention_dim": None},
    "twice itself": {"double_self_attention": True},
    "the text twice": {"only_cross_attention": True},
    "norms without weights": {"norm_elementwise_affine": False},
    "tanh": {"activation_fn": "gelu-approximate"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_alone(name):
    model, inputs = block(**CONFIGS[name])
    if name == "twice itself":
        inputs["encoder_hidden_states"] = None
    sites = fused_sites(check_exact(model, inputs))
    assert sites["residual + norm"] == (1 if model.attn2 is None else 2)


@pytest.mark.compatibility("GLIGEN")
def test_boxes_of_gligen():
    model, inputs = block(attention_type="gated")
    torch.nn.init.ones_(model.fuser.alpha_attn)
    plain = run(model, inputs)
    inputs["cross_attention_kwargs"] = {"gligen": {"objs": torch.randn(2, 3, 32)}}
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)


def test_feed_forward_in_chunks():
    model, inputs = sdxl()
    for module in model.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(1, dim=1)
    assert "residual + norm" not in check_exact(model, inputs).sites


@pytest.mark.compatibility("custom attention processors")
def test_a_processor_of_ones_own_is_called():
    from diffusers.models.attention_processor import AttnProcessor

    model, inputs = sdxl()
    model.set_attn_processor(AttnProcessor())
    check_exact(model, inputs)


@pytest.mark.compatibility("PAG")
@pytest.mark.usefixtures("either_way")
def test_perturbed_attention_guidance():
    """The last third of the batch gets an identity in place of attention."""
    from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0

    model, inputs = block()
    inputs = {name: torch.cat((given, given[:1])) for name, given in inputs.items()}
    plain = run(model, inputs)
    model.attn1.set_processor(PAGCFGIdentitySelfAttnProcessor2_0())
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


@pytest.mark.compatibility("ControlNet")
def test_a_control_net_beside_it():
    from diffusers import ControlNetModel

    model, inputs = sdxl()
    torch.manual_seed(0)
    control = ControlNetModel.from_unet(model).eval()
    shape = inputs["sample"].shape
    image = torch.randn(shape[0], 3, 8 * shape[2], 8 * shape[3])
    given = {**inputs, "controlnet_cond": image}
    blocks = kw.inspect(control).count("BasicTransformerBlock")
    sites = fused_sites(check_exact(control, given))
    assert sites["residual + norm"] > 2 * blocks


def test_an_adapter_on_the_projections():
    from peft import LoraConfig

    model, inputs = sdxl()
    plain = run(model, inputs)
    targets = ["to_q", "to_out.0", "net.0.proj", "net.2"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    assert not same(run(model, inputs), plain)
    check_exact(model, inputs)
    inputs["cross_attention_kwargs"] = {"scale": 0.5}
    check_exact(model, inputs)


def test_the_scale_that_geglu_no_longer_takes():
    from diffusers.models.activations import GEGLU

    model, rows = GEGLU(16, 24).eval(), torch.randn(3, 16)
    expected = model(rows)
    with kw.injected(model), pytest.warns(FutureWarning, match="scale"):
        assert torch.equal(model(rows, 0.5), expected)


@pytest.mark.parametrize("numerics", share(["exact", "fused"], 2))
def test_a_compiled_transformer(numerics):
    model, inputs = sdxl()
    kw.inject(model, numerics=numerics)
    expected = run(model, inputs)
    torch._dynamo.reset()
    model.mid_block.attentions[0].compile(fullgraph=True, backend="eager")
    result = run(model, inputs)
    if numerics == "exact":
        assert same(result, expected)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    kw.restore(model)
    assert left_behind(model) == []
