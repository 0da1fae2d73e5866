"""Injected models under torch.compile on a GPU: the bits of eager, packed weights, graphs."""

import pytest
import torch
from inject.harness import run, same

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.reuse import packed_weights

pytest.importorskip("diffusers")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(name):
    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    return models.build(name, **how), models.inputs(name, **how)


def blocks(model):
    return model.blocks if hasattr(model, "blocks") else model.transformer_blocks


def packed(attention):
    layers = attention.to_q, attention.to_k, attention.to_v
    return packed_weights._of_weights[layers[0].weight.untyped_storage()].why is None


@pytest.mark.compatibility("torch.compile by block")
@pytest.mark.parametrize("name", ["ltx-video", "wan-1.3b", "sd3.5-medium"])
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_blocks_keep_the_bits(name, graphs):
    model, inputs = built(name)
    latents = [inputs["hidden_states"] + number for number in range(4)]
    given = [{**inputs, "hidden_states": x} for x in latents]
    expected = [run(model, i) for i in given]
    report = kw.inject(model, graphs=graphs)
    for block in blocks(model):
        block.compile(fullgraph=True)
    for i, wanted in zip(given, expected, strict=True):
        assert same(run(model, i), wanted)
    assert [g.captured for g in report.graphs] == ([1] if graphs else [])


def test_weights_are_packed_where_the_blocks_are_compiled():
    model, inputs = built("ltx-video")
    kw.inject(model)
    model.compile_repeated_blocks(fullgraph=True)
    for _ in range(packed_weights.TRIES):
        run(model, inputs)
    assert all(packed(block.attn1) for block in model.transformer_blocks)


@pytest.mark.parametrize("before", [False, True])
def test_graphs_of_inductor_see_another_text(before):
    """`before`: the model has run, and its weights lie side by side, when it is compiled."""
    model, inputs = built("ltx-video")
    texts = [inputs["encoder_hidden_states"], inputs["encoder_hidden_states"].flip(1)]
    given = [{**inputs, "encoder_hidden_states": text} for text in texts]
    expected = [run(model, i) for i in given]
    kw.inject(model)
    if before:
        run(model, inputs)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        for i, wanted in zip(given, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            (result,) = run(compiled, {**i, "return_dict": False})
            error = (result.float() - wanted[0].float()).norm() / wanted[0].float().norm()
            assert error < 2e-2  # Inductor rounds less often than eager
