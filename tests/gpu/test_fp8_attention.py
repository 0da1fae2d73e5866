"""Attention in eight bits on a GPU: its kernels, its error, and in a model."""

import pytest
import torch
import torch.nn.functional as F

import kernelwright as kw
from kernelwright import models
from kernelwright.inject.fp8 import attention, suitable_layers
from kernelwright.inject.verify import accuracy
from kernelwright.ops.fp8_attention import FP8_ATTENTION, QUANTIZE_KV, fp8_attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="its kernels are written for Hopper",
)


def heads(queries, keys, dim, batch=1, count=4):
    own = torch.Generator("cuda").manual_seed(0)

    def rows(tokens):
        return torch.randn(batch, tokens, count, dim, device="cuda", generator=own)

    query, key, value = rows(queries), rows(keys), rows(keys)
    key += 2 * torch.randn(count, dim, device="cuda", generator=own)
    return [t.bfloat16().transpose(1, 2) for t in (query, key, value)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("queries", "keys"), [(128, 128), (1000, 1300), (4608, 4608), (7, 20000), (300, 1), (65, 129)]
)
def test_kernels_compute_what_the_reference_does(queries, keys, dim):
    query, key, value = heads(queries, keys, dim)
    eight = QUANTIZE_KV(key, value, backend="cuda")
    by_ops = QUANTIZE_KV(key, value, backend="torch")
    for a, b in zip(eight[:2], by_ops[:2], strict=True):
        assert a.is_contiguous()
        assert (a.float() != b.float()).float().mean() < 0.01
    torch.testing.assert_close(eight[2], by_ops[2], rtol=1e-4, atol=0)
    operands = query, *eight, keys, dim**-0.5
    got = FP8_ATTENTION(*operands, backend="cuda")
    assert torch.equal(got, FP8_ATTENTION(*operands, backend="cuda"))
    assert got.stride() == query.stride()
    if queries * keys < 2**22:  # the reference holds all scores
        wanted = FP8_ATTENTION(*operands, backend="torch")
        # tensor cores keep fewer bits of a sum than float32 has
        assert accuracy.error(got, wanted) < 0.003
    truth = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert accuracy.error(got, truth) <= 0.047


def test_strided_views_of_a_packed_projection_are_read_where_they_lie():
    x = torch.randn(2, 640, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = [t.transpose(1, 2) for t in x.unbind(2)]
    apart = [t.contiguous() for t in views]
    together, each = fp8_attention(*views), fp8_attention(*apart)
    assert torch.equal(together, each)
    assert together.transpose(1, 2).is_contiguous()
    assert each.is_contiguous()


@pytest.mark.parametrize("which", range(3))
def test_operands_that_no_kernel_can_read_are_refused(which):
    """So that attention stays in 16 bits: plain PyTorch would hold all scores."""
    operands = list(heads(256, 256, 64))
    whole = operands[which]
    shifted = torch.empty(whole.numel() + 1, dtype=whole.dtype, device="cuda")[1:]
    operands[which] = shifted.view(whole.shape).copy_(whole)
    with pytest.raises(ValueError, match="four at once"):
        fp8_attention(*operands)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("recipes", [True, False])
def test_a_model_attends_in_eight_bits(recipes, graphs, monkeypatch):
    monkeypatch.setattr(suitable_layers, "ROWS", 4)
    monkeypatch.setattr(attention, "SERVED", {64: 16, 128: 16})
    from diffusers import FluxTransformer2DModel

    how = {"tiny": True, "dtype": torch.bfloat16, "device": "cuda"}
    inputs = models.inputs("flux-dev", **how)
    config = dict(models.build("flux-dev", tiny=True, device="meta").config)
    config |= {"num_attention_heads": 4, "attention_head_dim": 64, "axes_dims_rope": (8, 28, 28)}
    torch.manual_seed(0)
    model = FluxTransformer2DModel.from_config(config).eval().requires_grad_(False)
    model = model.to("cuda", torch.bfloat16)

    def run():
        with torch.no_grad():
            return model(**inputs)[0]

    expected = run()
    report = kw.inject(model, numerics="fp8", recipes=recipes, graphs=graphs)
    results = [run() for _ in range(4)]
    assert [f for f in report.findings if f.kind == "attention"]
    assert not report.problems
    assert all(torch.equal(r, results[0]) for r in results)
    assert accuracy.error(results[0], expected) < 0.25
    if graphs:
        assert report.graphs[0].captured == 1, report.graphs[0].describe()
