"""Injection together with LoRA, offload, hooks, torch.compile, training and parallelism."""

from itertools import pairwise

import pytest
import torch
from everything import share
from torch import nn

import kernelwright as kw
from inject.harness import check_exact, check_gradients, frames, left_behind, run, same
from kernelwright import models


def built(**how):
    build = {"tiny": True, "dtype": torch.float32}
    model, inputs = models.build("ltx-video", **build, **how), models.inputs("ltx-video", **build)
    return model, inputs, run(model, inputs)


@pytest.fixture
def ltx():
    return built()


@pytest.fixture
def one_block():
    """To trace a whole model takes as long as its blocks are many."""
    return built(layers=1)


def lora(model):
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), "style")


def injected_now(model, inputs):
    """The results of the injected model, injected and eager."""
    from kernelwright.inject.runtime.sites import eagerly

    with eagerly():
        expected = run(model, inputs)
    return run(model, inputs), expected


@pytest.mark.compatibility("LoRA")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("numerics", ["exact", "fused"])
def test_lora_before_and_after(ltx, numerics):
    model, inputs, plain = ltx
    kw.inject(model, numerics=numerics)
    run(model, inputs)
    lora(model)
    with_lora, expected = injected_now(model, inputs)
    assert not same(expected, plain)
    torch.testing.assert_close(with_lora, expected, rtol=1e-4, atol=1e-4)
    if numerics == "exact":
        assert same(with_lora, expected)
    kw.restore(model)
    assert same(run(model, inputs), expected)
    kw.inject(model, numerics=numerics)
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compatibility("LoRA")
@pytest.mark.usefixtures("either_way")
def test_lora_scale_fuse_and_unload(ltx):
    model, inputs, plain = ltx
    lora(model)
    kw.inject(model)
    results = [injected_now(model, inputs)]
    model.set_adapters("style", 0.3)
    results.append(injected_now(model, inputs))
    model.fuse_lora()
    results.append(injected_now(model, inputs))
    model.unfuse_lora()
    model.disable_lora()
    results.append(injected_now(model, inputs))
    model.enable_lora()
    inputs["attention_kwargs"] = {"scale": 0.5}
    results.append(injected_now(model, inputs))
    assert all(same(got, expected) for got, expected in results)
    distinct = [expected for _, expected in results]
    assert not any(same(a, b) for a, b in pairwise(distinct))
    del inputs["attention_kwargs"]
    model.unload_lora()
    got, expected = injected_now(model, inputs)
    assert same(got, expected)
    torch.testing.assert_close(got, plain)  # fusing and unfusing an adapter rounds the weights
    kw.restore(model)
    assert left_behind(model) == []


@pytest.mark.compatibility("sequential CPU offload")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("first", ["inject", "offload"])
def test_cpu_offload_in_either_order(ltx, first):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    model, inputs, expected = ltx
    if first == "inject":
        kw.inject(model)
        run(model, inputs)
        cpu_offload(model, execution_device="cpu")
    else:
        cpu_offload(model, execution_device="cpu")
        kw.inject(model)
    assert all(p.is_meta for p in model.proj_in.parameters())
    for _ in range(2):
        assert same(run(model, inputs), expected)
    if first == "inject":
        remove_hook_from_module(model, recurse=True)
        assert same(run(model, inputs), expected)
        kw.restore(model)
    else:
        kw.restore(model)
        assert same(run(model, inputs), expected)
        assert hasattr(model.proj_in, "_hf_hook")
        remove_hook_from_module(model, recurse=True)
    assert same(run(model, inputs), expected)
    assert not any(kw.inject.__module__ in repr(m.__dict__.get("forward")) for m in model.modules())


@pytest.mark.compatibility("group offload")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("first", ["inject", "offload"])
def test_group_offload_in_either_order(ltx, first):
    from diffusers.hooks import apply_group_offloading

    model, inputs, expected = ltx

    def offload():
        apply_group_offloading(
            model,
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
        )

    steps = [lambda: kw.inject(model), offload]
    for step in steps if first == "inject" else reversed(steps):
        step()
    for _ in range(2):
        assert same(run(model, inputs), expected)
    kw.restore(model)
    assert same(run(model, inputs), expected)


@pytest.mark.compatibility("forward hooks")
@pytest.mark.usefixtures("either_way")
def test_hooks_on_inner_modules_still_run(ltx):
    model, inputs, _ = ltx
    kw.inject(model)
    run(model, inputs)
    block = model.transformer_blocks[1]
    seen = []
    handles = [
        m.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
        for m in (block, block.norm1, block.attn1, block.attn1.norm_q, block.ff)
    ]
    got, expected = injected_now(model, inputs)
    assert same(got, expected)
    eager, injected = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert sorted(eager) == sorted(injected)
    for handle in handles:
        handle.remove()


@pytest.mark.compatibility("forward hooks")
@pytest.mark.usefixtures("either_way")
def test_a_hook_that_changes_what_flows_between_blocks(ltx):
    model, inputs, plain = ltx
    kw.inject(model)
    handle = model.transformer_blocks[0].register_forward_hook(lambda m, args, out: out.mul_(1.5))
    for _ in range(2):
        got, expected = injected_now(model, inputs)
        assert same(got, expected)
        assert not same(got, plain)
    handle.remove()
    assert same(run(model, inputs), plain)


@pytest.mark.usefixtures("either_way")
def test_a_block_that_is_skipped(ltx):
    model, inputs, _ = ltx
    kw.inject(model)
    run(model, inputs)
    removed = model.transformer_blocks
    model.transformer_blocks = nn.ModuleList([removed[0], removed[0], removed[1]])
    got, expected = injected_now(model, inputs)
    assert same(got, expected)


@pytest.mark.compatibility("set_attention_backend")
@pytest.mark.usefixtures("either_way")
def test_the_attention_backend_a_person_set(ltx):
    model, inputs, _ = ltx
    model.set_attention_backend("_native_math")
    expected = run(model, inputs)
    kw.inject(model)
    assert same(run(model, inputs), expected)
    model.reset_attention_backend()
    got, expected = injected_now(model, inputs)
    assert same(got, expected)


def test_the_attention_backend_a_person_set_for_all(ltx):
    from diffusers.models.attention_dispatch import attention_backend

    model, inputs, _ = ltx
    kw.inject(model, numerics="fused")
    with attention_backend("_native_math"):
        report = kw.inject(model, numerics="fused")
        run(model, inputs)
        assert "attention" not in report.sites
    report = kw.inject(model, numerics="fused")
    run(model, inputs)
    assert report.sites["attention"]


@pytest.mark.compatibility("torch.compile of the whole model", bits=False)
@pytest.mark.parametrize("numerics", share(["exact", "fused"], 2))
def test_compiled_whole_for_any_size(one_block, numerics):
    model, inputs, _ = one_block
    kw.inject(model, numerics=numerics)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    other = models.inputs("ltx-video", tiny=True, dtype=torch.float32, height=96, width=128)
    for given in (inputs, other):
        torch.testing.assert_close(run(compiled, given), run(model, given), rtol=1e-5, atol=1e-5)


def test_compiled_whole_and_restored(one_block):
    model, inputs, plain = one_block
    kw.inject(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, inputs), plain, rtol=1e-5, atol=1e-5)
    kw.restore(model)
    assert same(run(compiled, inputs), plain)


@pytest.mark.compatibility("torch.compile by block", bits=False)
def test_compiled_by_inductor(ltx):
    model, inputs, plain = ltx
    kw.inject(model)
    torch._dynamo.reset()
    model.transformer_blocks[0].compile(fullgraph=True)
    torch.testing.assert_close(run(model, inputs), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.compatibility("torch.compile by block", bits=False)
def test_compiled_blocks_share_one_trace(ltx):
    from torch._dynamo.utils import counters

    model, inputs, expected = ltx
    kw.inject(model)
    torch._dynamo.reset()
    counters.clear()
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_injecting_what_is_already_compiled(one_block):
    model, inputs, expected = one_block
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    run(compiled, inputs)
    report = kw.inject(compiled)
    assert report.replaced
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=1e-5, atol=1e-5)
    kw.restore(compiled)
    assert left_behind(model) == []


@pytest.mark.parametrize(
    ("numerics", "checkpointing"),
    share([("exact", False), ("fused", False), ("fused", True), ("exact", True)], 2),
)
def test_a_gradient_step(ltx, numerics, checkpointing):
    model, inputs, _ = ltx
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    check_gradients(model, inputs, numerics=numerics)


@pytest.mark.compatibility("whole pipelines")
def test_a_pipeline(tmp_path):
    pipe = models.ltx_pipeline(tiny=True, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    expected = frames(pipe, "a boat on a lake")
    report = kw.inject(pipe)
    assert torch.equal(frames(pipe, "a boat on a lake"), expected)
    assert not report.problems
    assert {line.component for line in report.lines} >= {"transformer", "text_encoder"}
    kw.restore(pipe)
    assert torch.equal(frames(pipe, "a boat on a lake"), expected)
    assert all(left_behind(m) == [] for m in (pipe.transformer, pipe.vae, pipe.text_encoder))


def test_gemma_is_left_alone_and_listed():
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
    )
    model = GemmaModel(config).eval()
    inputs = {"input_ids": torch.arange(8)[None], "use_cache": False}
    report = check_exact(model, inputs) if kw.inspect(model).replaced else kw.inspect(model)
    assert "1 + weight" in str(report)
    assert report.count("GemmaRMSNorm") == 0
