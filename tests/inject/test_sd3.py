"""Stable Diffusion 3 and 3.5: every fusion site is used, and the bits are eager's."""

import pytest
import torch

import kernelwright as kw
from inject.harness import (
    agrees_with_eager,
    check_exact,
    check_fused,
    check_gradients,
    fused_sites,
    run,
    same,
)
from kernelwright import models

# five blocks: two attend to the image twice, and the last drops the text
BLOCKS, DUAL = 5, 2


def sd3(dtype=torch.float32, layers=None, **size):
    build = {"tiny": True, "dtype": dtype}
    model = models.build("sd3.5-medium", **build, layers=layers)
    return model, models.inputs("sd3.5-medium", **build, **size)


PLACES = {
    # both streams of the first block, the second norm of each dual one, the last of the model
    "norm + modulate": 2 + DUAL + 1,
    "QK-norm": 2 * BLOCKS + DUAL,
    "attention": BLOCKS,
    # before each feed-forward, and at the first norms of each block but the first
    "gate + residual + norm + modulate": (2 * BLOCKS - 1) + 2 * (BLOCKS - 1),
    "gate + residual": DUAL + 1,
}
# the last block has no text to feed forward
GELUS = 2 * BLOCKS - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_gives_the_bits_of_eager(dtype):
    report = check_exact(*sd3(dtype))
    assert fused_sites(report) == {**PLACES, "GELU": GELUS}
    assert {n for n in report.sites if "one product" not in n} == {*PLACES, "GELU"}


def test_fused_errs_no_more_than_eager():
    sites = fused_sites(check_fused(*sd3(torch.bfloat16)))
    assert sites == {**PLACES, "attention": BLOCKS + DUAL, "linear + GELU": GELUS}


def test_one_prompt():
    check_exact(*sd3(torch.bfloat16, batch=1))


def test_sd3_without_qk_norm_and_dual_attention():
    model, inputs = sd3()
    config = {**model.config, "qk_norm": None, "dual_attention_layers": ()}
    model = type(model).from_config(config).eval()
    sites = fused_sites(check_exact(model, inputs))
    assert sites == {
        "norm + modulate": 3,
        "attention": BLOCKS,
        "gate + residual + norm + modulate": PLACES["gate + residual + norm + modulate"],
        "gate + residual": 1,
        "GELU": GELUS,
    }


@pytest.mark.compatibility("skip-layer guidance")
def test_layers_skipped_for_guidance():
    model, inputs = sd3()
    plain = run(model, inputs)
    inputs["skip_layers"] = [1, 2]
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


@pytest.mark.compatibility("ControlNet")
def test_control_signals_between_blocks():
    model, inputs = sd3()
    plain = run(model, inputs)
    tokens = inputs["hidden_states"][0, 0].numel() // 4
    signals = [torch.randn(2, tokens, model.inner_dim) for _ in range(2)]
    inputs["block_controlnet_hidden_states"] = signals
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


def test_a_feed_forward_in_chunks():
    model, inputs = sd3()
    kw.inject(model)
    assert agrees_with_eager(model, inputs)
    block, sizes = model.transformer_blocks[2], []
    block.set_chunk_feed_forward(1, dim=0)
    block.ff.register_forward_hook(lambda m, args, out: sizes.append(len(out)))
    assert agrees_with_eager(model, inputs)
    assert set(sizes) == {1}


@pytest.mark.compatibility("IP-Adapter")
def test_an_ip_adapter():
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0

    model, inputs = sd3()
    plain = run(model, inputs)
    dim = model.config.attention_head_dim
    for block in model.transformer_blocks:
        block.attn.set_processor(
            SD3IPAdapterJointAttnProcessor2_0(model.inner_dim, 32, dim, timesteps_emb_dim=32)
        )
    inputs["joint_attention_kwargs"] = {
        "ip_hidden_states": torch.randn(2, 4, 32),
        "temb": torch.randn(2, 32),
    }
    check_exact(model, inputs)
    assert not same(run(model, inputs), plain)


@pytest.mark.compatibility("custom attention processors")
def test_a_processor_of_ones_own_is_called():
    model, inputs = sd3()
    plain = run(model, inputs)
    original = type(model.transformer_blocks[0].attn.processor)

    class Louder(original):
        def __call__(self, *args, **kwargs):
            image, text = super().__call__(*args, **kwargs)
            return 2 * image, text

    kw.inject(model)
    model.transformer_blocks[1].attn.set_processor(Louder())
    assert agrees_with_eager(model, inputs)
    assert not same(run(model, inputs), plain)
    kw.restore(model)
    check_exact(model, inputs)


def test_fused_projections():
    model, inputs = sd3()
    # its processor for this needs the text
    model = type(model).from_config({**model.config, "dual_attention_layers": ()}).eval()
    kw.inject(model)
    with torch.no_grad():
        model.fuse_qkv_projections()
    assert agrees_with_eager(model, inputs)


def test_lora_on_every_projection():
    from peft import LoraConfig

    model, inputs = sd3()
    plain = run(model, inputs)
    kw.inject(model)
    assert agrees_with_eager(model, inputs)
    targets = ["to_q", "add_k_proj", "to_out.0", "net.0.proj", "norm1.linear"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), "style")
    for scale in (1.0, 0.5):
        inputs["joint_attention_kwargs"] = {"scale": scale}
        assert agrees_with_eager(model, inputs)
    assert not same(run(model, inputs), plain)
    kw.inject(model, numerics="fused")
    fused = run(model, inputs)
    kw.restore(model)
    torch.testing.assert_close(fused, run(model, inputs), rtol=1e-4, atol=1e-4)


def test_hooks_on_inner_modules_still_run():
    model, inputs = sd3()
    kw.inject(model)
    run(model, inputs)
    seen = []
    dual, last = model.transformer_blocks[1], model.transformer_blocks[-1]
    inner = (dual.norm1, dual.norm1_context.norm, dual.norm2, dual.attn2, dual.attn2.norm_k)
    handles = [
        m.register_forward_hook(lambda module, args, out: seen.append(module))
        for m in (*inner, last.norm1_context, last.attn.norm_added_q, last.ff)
    ]
    assert agrees_with_eager(model, inputs)
    assert len(seen) == 3 * len(handles)
    assert len(set(seen)) == len(handles)


def test_a_hook_that_changes_what_flows_between_blocks():
    model, inputs = sd3()
    plain = run(model, inputs)
    kw.inject(model)
    run(model, inputs)

    def louder(module, args, out):
        return out[0].mul_(1.5), out[1]

    model.transformer_blocks[0].register_forward_hook(louder)
    assert agrees_with_eager(model, inputs)
    assert not same(run(model, inputs), plain)


def test_compiled_whole():
    model, inputs = sd3(layers=1)  # the first of its blocks and the last
    kw.inject(model)
    expected = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_step():
    model, inputs = sd3(layers=1)
    check_gradients(model, inputs)


def test_full_size_leaves_no_norm_alone():
    report = kw.inspect(models.build("sd3.5-medium", device="meta"))
    assert report.count("JointTransformerBlock") == 24
    assert report.count("Attention") == 24 + 13
    assert not [line for line in report.lines if line.left_alone and "Norm" in line.kind]
