"""In the tier "fp8", a layer that is given few rows has its weight as int8."""

import pytest
import torch
from torch import nn

import kernelwright as kw
from kernelwright.inject.fp8 import memory_blocks, resting
from kernelwright.inject.runtime import forwards
from kernelwright.inject.state.weights_at_rest import is_at_rest
from kernelwright.inject.verify import accuracy

INT8, FP8 = 0.018, 0.074


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(resting, "leaves_gpu", lambda weight: True)
    monkeypatch.setattr(memory_blocks, "SMALLEST", 2**16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(64))  # whose device says where the model is
        self.blocks = nn.ModuleList([nn.Linear(64, 128)])

    def forward(self, x):
        return self.blocks[0](x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


@pytest.fixture
def rows():
    return torch.randn(100, 64)


def eager(model, x):
    layer = model.blocks[0]
    return nn.functional.linear(x, layer.weight.data, layer.bias)


def kinds(report):
    return [f.kind for f in report.findings]


def test_few_rows_read_integers_and_more_rows_fp8(model, rows):
    report = kw.inject(model, numerics="fp8")
    for _ in range(2):
        assert accuracy.error(model(rows[:3]), eager(model, rows[:3])) <= INT8
        assert is_at_rest(model.blocks[0].weight)
    assert kinds(report) == ["Linear of few rows"]
    # a prompt: from now on few rows read the weight in fp8, too
    assert INT8 < accuracy.error(model(rows), eager(model, rows)) <= FP8
    assert INT8 < accuracy.error(model(rows[:3]), eager(model, rows[:3])) <= FP8
    assert kinds(report) == ["Linear of few rows", "Linear"]
    assert is_at_rest(model.blocks[0].weight)


def test_rows_that_are_neither_few_nor_many_are_computed_in_16_bits(model, rows):
    report = kw.inject(model, numerics="fp8")
    assert torch.equal(model(rows[:40]), eager(model, rows[:40]))
    model(rows[:3])
    assert torch.equal(model(rows[:40]), eager(model, rows[:40]))
    assert "fewer than 64 rows" in report.summary
    assert accuracy.error(model(rows[:3]), eager(model, rows[:3])) <= INT8


def test_a_weight_that_is_written_to_is_quantised_again(model, rows):
    kw.inject(model, numerics="fp8")
    before = model(rows[:3])
    with torch.no_grad():
        model.blocks[0].weight.mul_(2)
    now = model(rows[:3])
    assert not torch.equal(now, before)
    assert accuracy.error(now, eager(model, rows[:3])) <= INT8


def test_outliers_keep_16_bits(model, rows):
    with torch.no_grad():
        model.blocks[0].weight[:, 0] = 30.0
    x = rows[:3].clone()
    x[:, 0] = 0
    report = kw.inject(model, numerics="fp8")
    with pytest.warns(UserWarning, match="as int8; that stays eager"):
        model(x)
    assert torch.equal(model(x), eager(model, x))
    assert report.problems
    assert not is_at_rest(model.blocks[0].weight)


def test_a_dropped_weight_serves_more_rows_by_its_integers(model, rows):
    expected = eager(model, rows)
    kw.inject(model, numerics="fp8", keep=None)
    model(rows[:3])
    assert accuracy.error(model(rows), expected) <= INT8
    assert accuracy.error(model(rows[:3]), expected[:3]) <= INT8


def test_restored_it_has_its_bits(model, rows):
    expected = model(rows[:3])
    with kw.injected(model, numerics="fp8"):
        assert not torch.equal(model(rows[:3]), expected)
    assert torch.equal(model(rows[:3]), expected)
    assert not is_at_rest(model.blocks[0].weight)


def test_gradients_are_recorded_in_16_bits(model, rows):
    model.requires_grad_(True)
    kw.inject(model, numerics="fp8")
    assert torch.equal(model(rows[:3]), eager(model, rows[:3]))
    with torch.no_grad():
        assert accuracy.error(model(rows[:3]), eager(model, rows[:3])) <= INT8


def test_a_layer_that_was_quantised_ahead_gets_integers_in_the_same_memory(model, rows):
    expected = eager(model, rows[:3])
    kw.inject(model, numerics="fp8")
    layers = getattr(forwards.installed(model.blocks[0]), forwards.MARK)
    layers.quantise_now(model.blocks[0], torch.device("cpu"))
    ahead = layers._layers[model.blocks[0]].weight
    assert accuracy.error(model(rows[:3]), expected) <= INT8
    kept = layers._layers[model.blocks[0]]
    assert kept.integers
    assert kept.weight.data_ptr() == ahead.data_ptr()
