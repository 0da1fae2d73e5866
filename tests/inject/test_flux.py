"""FLUX.1: every fusion site is used, and the bits are eager's."""

import pytest
import torch
from everything import share

import kernelwright as kw
from inject.harness import (
    agrees_with_eager,
    check_exact,
    check_fused,
    check_gradients,
    fused_sites,
    programs_of,
    run,
    same,
)
from kernelwright import models

DOUBLE, SINGLE = 2, 2


def flux(dtype=torch.float32, layers=None, **size):
    build = {"tiny": True, "dtype": dtype}
    model = models.build("flux-dev", **build, layers=layers)
    return model, models.inputs("flux-dev", **build, **size)


def places(across=True):
    """The fusion sites of two blocks of each kind; `across`: also from block to block."""
    return {
        # the first block of a kind, and the last norm of the model
        "norm + modulate": 2 + 1 + 1 + (0 if across else 3),
        "QK-norm + RoPE": 2 * DOUBLE + SINGLE,
        "gate + residual + norm + modulate": 2 * DOUBLE + (3 if across else 0),
        # the last block of a kind
        "gate + residual": 2 + 1 + (0 if across else 3),
    }


# in the feed-forwards of both streams, and in the single blocks
GELUS = {"GELU": 2 * DOUBLE, "GELU into joined rows": SINGLE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_the_bits_of_eager(dtype):
    report = check_exact(*flux(dtype))
    # in float16 the sums are clipped before they are normalised
    assert fused_sites(report) == {**places(across=dtype != torch.float16), **GELUS}
    assert {n for n in report.sites if "one product" not in n} == {*places(), *GELUS}


def test_fused_errs_no_more_than_eager():
    sites = fused_sites(check_fused(*flux(torch.bfloat16)))
    assert sites == {
        **places(),
        "attention": DOUBLE + SINGLE,
        "linear + GELU": 2 * DOUBLE,
        "linear + GELU, last product in two": SINGLE,
    }


def test_without_its_recipe_the_bits_are_the_same():
    model, inputs = flux(torch.bfloat16)
    blocks = {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    assert set(programs_of(check_exact(model, inputs, recipes=False))[0]) == blocks


def test_several_prompts_and_no_guidance():
    model, inputs = flux(batch=2)
    check_exact(model, inputs)
    distilled = type(model).from_config({**model.config, "guidance_embeds": False}).eval()
    del inputs["guidance"]
    check_exact(distilled, inputs)


@pytest.mark.compatibility("ControlNet")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("repeat", [False, True])
def test_control_signals_between_blocks(repeat):
    model, inputs = flux()
    plain = run(model, inputs)
    shape = (*inputs["hidden_states"].shape[:2], model.inner_dim)
    signals = [torch.randn(shape) for _ in range(4)]
    inputs["controlnet_block_samples"] = signals[:2]
    inputs["controlnet_single_block_samples"] = signals[2:]
    inputs["controlnet_blocks_repeat"] = repeat
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


@pytest.mark.compatibility("ControlNet")
def test_the_controlnet_itself():
    from diffusers import FluxControlNetModel

    model, inputs = flux()
    config = {k: v for k, v in model.config.items() if not k.startswith("_")}
    net = FluxControlNetModel.from_config(config).eval()
    for block in net.controlnet_blocks + net.controlnet_single_blocks:
        torch.nn.init.normal_(block.weight, std=0.1)  # zero by default, which would hide mistakes
    inputs["controlnet_cond"] = torch.randn_like(inputs["hidden_states"])
    sites = fused_sites(check_exact(net, inputs))
    assert sites == {**places(), **GELUS, "norm + modulate": places()["norm + modulate"] - 1}


@pytest.mark.compatibility("IP-Adapter")
def test_an_ip_adapter_adds_its_image_last():
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, inputs = flux()
    plain = run(model, inputs)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(model.inner_dim, 32))
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 32)]}
    sites = fused_sites(check_exact(model, inputs))
    assert sites["QK-norm + RoPE"] == SINGLE
    assert not same(run(model, inputs), plain)


@pytest.mark.compatibility("custom attention processors")
def test_a_processor_of_ones_own_is_called():
    model, inputs = flux()
    plain = run(model, inputs)
    original = type(model.transformer_blocks[0].attn.processor)

    class Louder(original):
        def __call__(self, *args, **kwargs):
            image, text = super().__call__(*args, **kwargs)
            return 2 * image, text

    model.transformer_blocks[1].attn.set_processor(Louder())
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


def test_query_and_key_that_differ_stay_eager(monkeypatch):
    """Both streams are written into one tensor; so must be the fallback of a wrong one."""
    from kernelwright.inject.fusions import query_key as fusions

    op = fusions.QK_NORM_ROPE

    def wrong(*args, **how):
        return tuple(t.mul_(1.001) for t in op(*args, **how))

    monkeypatch.setattr(fusions, "QK_NORM_ROPE", wrong)
    model, inputs = flux()
    report = kw.inject(model)
    with pytest.warns(UserWarning, match="QK-norm"):
        assert agrees_with_eager(model, inputs)
    assert "fused" not in report.sites["QK-norm + RoPE"]


def test_fused_projections():
    model, inputs = flux()
    model.fuse_qkv_projections()
    check_exact(model, inputs)


@pytest.mark.usefixtures("either_way")
def test_the_attention_backend_a_person_set():
    model, inputs = flux()
    model.set_attention_backend("_native_math")
    check_exact(model, inputs)
    model.reset_attention_backend()


@pytest.mark.usefixtures("either_way")
def test_lora_on_every_projection():
    from peft import LoraConfig

    model, inputs = flux()
    plain = run(model, inputs)
    kw.inject(model)
    assert agrees_with_eager(model, inputs)
    targets = ["to_q", "add_k_proj", "to_out.0", "net.0.proj", "proj_mlp", "norm1.linear"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), "style")
    for scale in (1.0, 0.5):
        inputs["joint_attention_kwargs"] = {"scale": scale}
        assert agrees_with_eager(model, inputs)
    assert not same(run(model, inputs), plain)
    kw.inject(model, numerics="fused")
    fused = run(model, inputs)
    kw.restore(model)
    torch.testing.assert_close(fused, run(model, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("either_way")
def test_hooks_on_inner_modules_still_run():
    model, inputs = flux()
    kw.inject(model)
    run(model, inputs)
    seen = []
    double, single = model.transformer_blocks[1], model.single_transformer_blocks[1]
    inner = (double.norm1, double.norm1.norm, double.norm2_context, double.attn.norm_added_q)
    handles = [
        m.register_forward_hook(lambda module, args, out: seen.append(module))
        for m in (*inner, single.norm, single.norm.linear, single.act_mlp)
    ]
    assert agrees_with_eager(model, inputs)
    assert len(seen) == 3 * len(handles)
    assert len(set(seen)) == len(handles)
    kw.inject(model, numerics="fused")
    run(model, inputs)
    assert set(seen[3 * len(handles) :]) == set(seen)


@pytest.mark.parametrize("kind", ["transformer_blocks", "single_transformer_blocks"])
def test_a_hook_that_changes_what_flows_between_blocks(kind):
    model, inputs = flux()
    plain = run(model, inputs)
    kw.inject(model)
    run(model, inputs)

    def louder(module, args, out):
        return out[0], out[1].mul_(1.5)

    getattr(model, kind)[0].register_forward_hook(louder)
    assert agrees_with_eager(model, inputs)
    assert not same(run(model, inputs), plain)


@pytest.mark.parametrize("numerics", share(["exact", "fused"], 2, start=1))
def test_compiled_whole(numerics):
    model, inputs = flux(layers=1)  # of each kind
    kw.inject(model, numerics=numerics)
    expected = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_step():
    model, inputs = flux(layers=1)
    check_gradients(model, inputs)


def test_full_size_leaves_no_norm_alone():
    report = kw.inspect(models.build("flux-dev", device="meta"))
    assert report.count("FluxTransformerBlock") == 19
    assert report.count("FluxSingleTransformerBlock") == 38
    assert report.count("FluxAttention") == 57
    assert not [line for line in report.lines if line.left_alone and "Norm" in line.kind]
