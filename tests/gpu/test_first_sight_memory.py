"""What first sight needs on a GPU beside the model is little, and it does without."""

import gc

import pytest
import torch
import torch.nn.functional as F
from inject.harness import run, same

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.verify import accuracy, float32_run

pytest.importorskip("diffusers")
GIB = 2**30


def peak(call):
    """The most bytes that tensors had during a call."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
def test_large_attention_in_float32_is_true_and_small(mask, kv_heads):
    q = torch.randn(1, 32, 3000, 128, device="cuda")
    k, v = (torch.randn(1, kv_heads, 3000, 128, device="cuda") for _ in range(2))
    how = {"enable_gqa": kv_heads != 32, "is_causal": mask == "causal"}
    if mask == "bool":
        how["attn_mask"] = torch.arange(3000, device="cuda").expand(1, 1, 1, 3000) < 2000
    elif mask == "added":
        how["attn_mask"] = torch.randn(1, 1, 3000, 3000, device="cuda")
    expected = F.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)),
        **{n: t.double() if n == "attn_mask" and mask == "added" else t for n, t in how.items()},
    )
    plain = accuracy.error(F.scaled_dot_product_attention(q, k, v, **how), expected)
    got = float32_run.attention(q, k, v, **how)
    assert accuracy.error(got, expected) <= max(2 * plain, accuracy.FLOAT32_ERROR)
    before = torch.cuda.memory_allocated()
    assert peak(lambda: float32_run.attention(q, k, v, **how)) - before < 6 * 4 * float32_run.SCORES


@pytest.mark.parametrize("name", ["ltx-video", "sd3.5-medium"])
def test_the_first_forward_needs_little_more_than_eager(name):
    how = {"dtype": torch.bfloat16, "device": "cuda"}
    model, inputs = models.build(name, **how), models.inputs(name, **how)
    eager = peak(lambda: run(model, inputs))
    with kw.injected(model, numerics="fused") as report:
        first = peak(lambda: run(model, inputs))
    assert not [f for f in report.findings if f.unchecked]
    assert first <= 1.1 * eager, (first / GIB, eager / GIB)


def test_on_a_full_gpu_the_check_is_left_out(monkeypatch):
    how = {"dtype": torch.bfloat16, "device": "cuda", "tiny": True}
    model, inputs = models.build("ltx-video", **how), models.inputs("ltx-video", **how)
    with kw.injected(model, numerics="fused"):
        run(model, inputs)
        expected = run(model, inputs)
    gc.collect()
    usual, held = float32_run.Float32Run.__call__, torch.cuda.memory_allocated()

    def greedy(self, args, kwargs):
        return usual(self, args, kwargs), torch.empty(2**50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(float32_run.Float32Run, "__call__", greedy)
    with kw.injected(model, numerics="fused") as report:
        with pytest.warns(UserWarning, match=f"not compared with eager: {accuracy.NO_MEMORY}"):
            result = run(model, inputs)
        assert same(result, expected)
        assert any(f.unchecked == accuracy.NO_MEMORY for f in report.findings)
    del result, report
    gc.collect()
    assert torch.cuda.memory_allocated() <= held
