"""The tier "fp8": layers in eight bits, each held against its own forward."""

import copy

import pytest
import torch
from torch import nn

import kernelwright as kw
from kernelwright import models
from kernelwright.inject import contract, eight_bits
from kernelwright.inject.graphs import capture

from .harness import left_behind, run, same


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """A tiny model has fewer rows than a layer needs to be worth it."""
    monkeypatch.setattr(eight_bits, "ROWS", 4)


def built(name="ltx-video", **sizes):
    how = {"tiny": True, "dtype": torch.float32}
    return models.build(name, **how), models.inputs(name, **how, **sizes)


@pytest.mark.parametrize("name", ["ltx-video", "flux-dev", "sd3.5-medium", "wan-1.3b", "qwen3-8b"])
def test_a_model_comes_near_and_is_brought_back(name):
    model, inputs = built(name)
    expected = run(model, inputs)
    report = kw.inject(model, numerics="fp8")
    result = run(model, inputs)
    assert same(run(model, inputs), result)
    layers = [f for f in report.findings if f.kind == "Linear"]
    assert layers
    assert not report.problems
    assert all(0.01 < f.error <= eight_bits.LIMIT for f in layers)
    assert 0 < contract.error(result, expected) < 0.25
    assert "layers in eight bits" in report.summary
    kw.restore(model)
    assert same(run(model, inputs), expected)
    assert not left_behind(model)


def test_first_and_last_layers_and_modulations_stay_as_they_are():
    model, _ = built("flux-dev")
    report = kw.inject(model, numerics="fp8")
    left = {line.where for line in report.lines if line.left_alone and "Linear" in line.kind}
    assert {"x_embedder", "proj_out", "context_embedder"} <= left
    run(model, built("flux-dev")[1])
    assert "fewer than 4 rows" in report.summary  # the modulations


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        for layer in self.blocks:
            x = layer(x)
        return x


def stack():
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


def test_a_layer_that_loses_too_much_stays_eager_and_is_named():
    model, x = stack(), torch.randn(8, 64)
    # one value so large that all others of its row vanish beside it
    model.blocks[1].weight[:, 0] = 1e7
    model.blocks[0].weight[0], model.blocks[0].bias[0] = 0, 0
    expected = model(x)
    report = kw.inject(model, numerics="fp8")
    with pytest.warns(UserWarning, match=r"blocks\.1 .* in eight bits"):
        model(x)
    assert [f.module for f in report.problems] == ["blocks.1"]
    assert contract.error(model(x), expected) <= 2 * eight_bits.LIMIT


def test_a_weight_that_is_written_to_counts_at_once():
    model, x = stack(), torch.randn(8, 64)
    kw.inject(model, numerics="fp8")
    before = model(x)
    with torch.no_grad():
        model.blocks[0].weight.mul_(2)
    after = model(x)
    assert not torch.equal(before, after)
    kw.restore(model)
    assert contract.error(after, model(x)) < 0.1


def test_a_merged_adapter_counts_although_it_is_written_behind_the_version():
    model, x = stack(), torch.randn(8, 64)
    kw.inject(model, numerics="fp8")
    layer = model.blocks[0]
    model(x)
    wrapper = nn.Module()
    wrapper.base_layer = layer
    layer.weight.data += 1.0
    model.blocks[0] = layer
    result = model(x)
    kw.restore(model)
    assert contract.error(result, model(x)) < 0.1


def test_query_key_and_value_share_one_quantised_input(monkeypatch):
    seen = []
    made = eight_bits.fp8.quantize
    monkeypatch.setattr(eight_bits.fp8, "quantize", lambda *a: seen.append(a[0]) or made(*a))
    model, inputs = built()
    kw.inject(model, numerics="fp8")
    run(model, inputs)
    seen.clear()
    run(model, inputs)
    # a block: for self-attention, its output, cross-attention's query, its output, both halves of
    # the feed-forward
    assert len(seen) == 6 * len(model.transformer_blocks)


def test_a_copy_of_the_model_runs_in_eight_bits_too():
    model, x = stack(), torch.randn(8, 64)
    kw.inject(model, numerics="fp8")
    model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    twin.blocks[0].weight.mul_(2)
    assert not torch.equal(twin(x), model(x))


def test_a_layer_that_was_left_out_by_name_stays_as_it_is():
    model, x = stack(), torch.randn(8, 64)
    report = kw.inject(model, numerics="fp8", skip=["blocks.1"])
    model(x)
    assert [f.module for f in report.findings] == ["blocks.0"]


def test_rows_made_before_a_recording_are_no_part_of_it():
    x = torch.randn(8, 64)
    rows = eight_bits._rows(x)
    assert eight_bits._rows(x) is rows
    with capture.recording():
        inside = eight_bits._rows(x)
        assert inside is not rows
        assert eight_bits._rows(x) is inside
    assert eight_bits._rows(x) is not inside


def test_gradients_are_those_of_eager():
    model, x = Block().train(), torch.randn(8, 64)
    kw.inject(model, numerics="fp8")
    model(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    kw.restore(model)
    model.zero_grad()
    model(x).sum().backward()
    assert all(map(torch.equal, got, [p.grad for p in model.parameters()]))


def test_under_torch_compile_it_is_what_fused_is():
    model, x = stack(), torch.randn(8, 64)
    expected = model(x)
    kw.inject(model, numerics="fp8")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
