"""The float32 run that errors are measured against: accurate, and small in memory."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from inject.harness import same
from kernelwright import models
from kernelwright.inject.runtime.sites import eagerly
from kernelwright.inject.verify import accuracy, float32_run

QUERY, KEY = (2, 4, 9, 8), (2, 4, 7, 8)
MASKS = {
    "none": None,
    "rows": torch.rand(9, 7) > 0.3,
    "keys": torch.arange(7).expand(2, 1, 1, 7) < 5,
    "added": torch.randn(2, 4, 9, 7),
    "added to heads": torch.randn(4, 1, 7),
    "nothing allowed": torch.arange(9)[:, None].expand(9, 7) != 3,
}


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors created during the `with` block."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {k: (ref, size) for k, (ref, size) in self.made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result


# 1: a row of one head, 40: some rows, 130: two heads, 300: a sample
@pytest.mark.parametrize("scores", [1, 40, 130, 300])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_in_pieces_is_attention(mask, scores, monkeypatch):
    q, k, v = noise(*QUERY), noise(*KEY, seed=1), noise(2, 4, 7, 5, seed=2)
    expected = F.scaled_dot_product_attention(q, k, v, MASKS[mask], scale=0.3)
    monkeypatch.setattr(float32_run, "SCORES", scores)
    got = float32_run.attention(q, k, v, MASKS[mask], scale=0.3)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scores", [1, 40, 130])
@pytest.mark.parametrize("keys", [5, 9, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_and_causal_attention_in_pieces(kv_heads, keys, scores, monkeypatch):
    q, k, v = noise(*QUERY), noise(2, kv_heads, keys, 8, seed=1), noise(2, kv_heads, keys, 8)
    for causal in (False, True):
        how = {"is_causal": causal, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(q, k, v, **how)
        with monkeypatch.context() as patch:
            patch.setattr(float32_run, "SCORES", scores)
            got = float32_run.attention(q, k, v, **how)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(query=q, key=k, value=v, enable_gqa=True)


def test_attention_of_a_module_keeps_few_scores(monkeypatch):
    q, k = noise(2, 8, 64, 4), noise(2, 2, 64, 4)
    expected = Attention()(q, k, k)
    peaks = {}
    for scores in (2**12, 2**20):
        monkeypatch.setattr(float32_run, "SCORES", scores)
        run = float32_run.Float32Run(Attention(), Attention.forward, "cpu")
        with sdpa_kernel(SDPBackend.MATH), Live() as live:
            torch.testing.assert_close(run((q, k, k), {}), expected)
        peaks[scores] = live.peak
    whole = 4 * 2 * 8 * 64 * 64
    assert peaks[2**20] > 2 * whole
    assert peaks[2**12] < whole / 2


class Layers(nn.Module):
    """Layers that a float32 copy may get wrong: a weight used twice, a dtype, buffers."""

    def __init__(self, width=64, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.3))
        self.register_buffer("calls", torch.zeros(1))
        self.to(torch.bfloat16).requires_grad_(False)
        self.batches = []

    def forward(self, x):
        self.batches.append(len(x))
        self.calls.add_(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)))
        x = x.to(next(self.parameters()).dtype)
        return x * self.scale + self.shift


def test_the_truth_is_what_a_float32_copy_gives():
    module, x = Layers(), noise(3, 64, dtype=torch.bfloat16)
    expected = copy.deepcopy(module).float()(x.float())
    before = copy.deepcopy(module.state_dict())
    got = float32_run.Float32Run(module, Layers.forward, "cpu")((x,), {})
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())


def test_a_float32_run_holds_one_widened_weight_at_a_time():
    module, x = Layers(width=256), noise(3, 256, dtype=torch.bfloat16)
    with torch.no_grad(), Live() as live:
        float32_run.Float32Run(module, Layers.forward, "cpu")((x,), {})
    weight = 4 * 256 * 256
    assert weight <= live.peak < 1.5 * weight


def test_a_block_of_a_model_has_the_truth_of_a_copy(monkeypatch):
    build = {"tiny": True, "dtype": torch.bfloat16}
    model, inputs = models.build("sd3.5-medium", **build), models.inputs("sd3.5-medium", **build)
    block, calls = model.transformer_blocks[0], []
    block.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
        args, kwargs = calls[0]
        wide_args, wide_kwargs = float32_run.widened((args, kwargs))
        expected = nn.Module.float(copy.deepcopy(block))(*wide_args, **wide_kwargs)
        got = float32_run.Float32Run(block, type(block).forward, "cpu")(args, kwargs)
        assert same(got, expected)
        monkeypatch.setattr(float32_run, "SCORES", 64)
        got = float32_run.Float32Run(block, type(block).forward, "cpu")(args, kwargs)
    assert accuracy.error(got, expected) < 1e-6


def errors_of(module, x, off=None, **more):
    """The errors of a result that differs from eager's by `off`."""
    eager = type(module).forward
    with torch.no_grad():
        expected = eager(module, x, **more)
    result = expected if off is None else expected + off.to(expected.dtype)
    module.batches.clear()
    return accuracy.errors(module, eager, (x,), more, result, expected, eagerly)


def test_samples_are_run_one_by_one_with_the_errors_of_all(monkeypatch):
    module, x = Layers(), noise(5, 40, 64, dtype=torch.bfloat16)
    whole = errors_of(module, x)
    assert 1e-4 < whole["eager_error"] < 1e-2
    monkeypatch.setattr(accuracy, "SAMPLES", 2 * 40 * 64)
    parts = errors_of(module, x)
    # the other calls are those of the float32 copy
    assert module.batches == [2, 2, 1]
    for name, value in whole.items():
        assert math.isclose(parts[name], value, rel_tol=1e-3)


@pytest.mark.parametrize("sample", range(3))
def test_an_error_in_any_sample_is_found(sample, monkeypatch):
    monkeypatch.setattr(accuracy, "SAMPLES", 1)
    module, x = Layers(), noise(3, 40, 64, dtype=torch.bfloat16)
    off = torch.zeros(3, 40, 64)
    off[sample] = 0.1
    found = errors_of(module, x, off)
    assert len(module.batches) == 3
    assert not accuracy.holds(3 * 40, **found)


class Mixing(Layers):
    """Mixes a little of the other samples into each."""

    def forward(self, x, share=0.0, batch=None):
        x = super().forward(x)
        return x + share * x.mean(0) if batch is None else x.view(batch, -1, 64)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_what_mixes_samples_is_run_whole(share, monkeypatch):
    module, x = Mixing(), noise(3, 40, 64, dtype=torch.bfloat16)
    whole = errors_of(module, x, share=share)
    monkeypatch.setattr(accuracy, "SAMPLES", 1)
    assert errors_of(module, x, share=share) == whole


def test_what_knows_its_batch_is_run_whole(monkeypatch):
    module, x = Mixing(), noise(3, 40, 64, dtype=torch.bfloat16)
    whole = errors_of(module, x, batch=3)
    monkeypatch.setattr(accuracy, "SAMPLES", 1)
    assert errors_of(module, x, batch=3) == whole
    assert whole["eager_error"] < 1e-2


class Repeated(Layers):
    """The batch size of its result differs from that of every input."""

    def forward(self, x, times=3):
        return (
            super().forward(x).expand(times, *x.shape) * torch.arange(1, times + 1)[:, None, None]
        )


def test_a_batch_that_the_module_makes_is_run_whole(monkeypatch):
    module, x = Repeated(), noise(40, 64, dtype=torch.bfloat16)
    whole = errors_of(module, x)
    monkeypatch.setattr(accuracy, "SAMPLES", 1)
    assert errors_of(module, x) == whole
    assert whole["eager_error"] < 1e-2
