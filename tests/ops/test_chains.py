"""The eager chains are the code of diffusers and transformers: their modules give those bits."""

import pytest
import torch
from declared import DTYPES
from torch import nn

import kernelwright as kw

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def drawn():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Said(nn.Module):
    """Stands for a branch of a block: keeps what it is given, answers with noise."""

    def forward(self, hidden_states, *_, **__):
        self.heard = hidden_states.clone()
        self.answer = torch.randn_like(hidden_states)
        return self.answer


def randomized(module, dtype):
    for p in module.parameters():
        p.copy_(torch.randn_like(p) * 0.3 + 1)
    return module.to(dtype).eval()


def heard_by_attention(module, monkeypatch):
    """Query and key as the processors of a diffusers file hand them to attention."""
    said = []

    def attention(query, key, value, **_):
        said.append((query.clone(), key.clone()))
        return value

    monkeypatch.setattr(module, "dispatch_attention_fn", attention)
    return said


@every_dtype
@pytest.mark.parametrize("affine", [True, False])
def test_rmsnorm_diffusers(dtype, affine):
    from diffusers.models.normalization import RMSNorm

    norm = randomized(RMSNorm(96, 1e-6, elementwise_affine=affine), dtype)
    x = torch.randn(2, 5, 96, dtype=dtype)
    assert torch.equal(kw.rmsnorm(x, norm.weight, 1e-6, exact="diffusers"), norm(x))


@every_dtype
@pytest.mark.parametrize("affine", [True, False])
def test_rmsnorm_torch(dtype, affine):
    norm = randomized(nn.RMSNorm(96, 1e-6, elementwise_affine=affine), dtype)
    x = torch.randn(2, 5, 96, dtype=dtype)
    assert torch.equal(kw.rmsnorm(x, norm.weight, 1e-6, exact="torch"), norm(x))


@every_dtype
def test_rmsnorm_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = randomized(LlamaRMSNorm(96, 1e-5), dtype)
    x, residual = torch.randn(2, 2, 5, 96, dtype=dtype).unbind()
    assert torch.equal(kw.rmsnorm(x, norm.weight, 1e-5, exact="transformers"), norm(x))
    got = kw.rmsnorm_residual(x, residual, norm.weight, 1e-5, exact="transformers")
    assert torch.equal(got[0], norm(residual + x))
    assert torch.equal(got[1], residual + x)


@every_dtype
@pytest.mark.parametrize("affine", [True, False])
def test_layernorm_torch_and_wan(dtype, affine):
    from diffusers.models.normalization import FP32LayerNorm

    x = torch.randn(2, 5, 96, dtype=dtype)
    for chain, kind in (("torch", nn.LayerNorm), ("wan", FP32LayerNorm)):
        norm = randomized(kind(96, 1e-6, elementwise_affine=affine), dtype)
        got = kw.layernorm(x, norm.weight, norm.bias, 1e-6, exact=chain)
        assert torch.equal(got, norm(x)), chain


@every_dtype
def test_geglu_halves_lie_as_in_diffusers(dtype):
    from diffusers.models.activations import GEGLU

    unit = GEGLU(32, 64).to(dtype)
    x = torch.randn(2, 5, 32, dtype=dtype)
    got = kw.geglu(unit.proj(x), approximate=False, exact="torch")
    assert torch.equal(got, unit(x))


@every_dtype
def test_swiglu_halves_lie_as_in_transformers(dtype):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    unit = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=64)).to(dtype)
    unit.down_proj = nn.Identity()
    x = torch.randn(2, 5, 32, dtype=dtype)
    packed = torch.cat((unit.gate_proj(x), unit.up_proj(x)), -1)
    assert torch.equal(kw.swiglu(packed, exact="torch"), unit(x))
    assert torch.equal(kw.silu_mul(unit.gate_proj(x), unit.up_proj(x), exact="torch"), unit(x))


def tables(*shape):
    angle = torch.rand(*shape) * 6.28
    return angle.cos(), angle.sin()


@every_dtype
def test_rope_ltx(dtype):
    from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

    x = torch.randn(2, 6, 64, dtype=dtype)
    cos, sin = tables(2, 6, 64)
    got = kw.apply_rope(x, cos, sin, exact="diffusers")
    assert torch.equal(got, apply_rotary_emb(x, (cos, sin)))


@every_dtype
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_flux(dtype, layout):
    from diffusers.models.embeddings import apply_rotary_emb

    x = torch.randn(2, 6, 3, 64, dtype=dtype)
    cos, sin = tables(6, 64)
    pairs = {"interleaved": -1, "half": -2}[layout]
    expected = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=pairs, sequence_dim=1)
    assert torch.equal(kw.apply_rope(x, cos, sin, layout, exact="diffusers"), expected)


@every_dtype
def test_rope_llama(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = (torch.randn(2, heads, 6, 64, dtype=dtype) for heads in (4, 2))
    cos, sin = (t.to(dtype) for t in tables(2, 6, 64))
    got = kw.apply_rope_qk(
        query, key, cos.unsqueeze(1), sin.unsqueeze(1), "half", exact="transformers"
    )
    assert all(map(torch.equal, got, apply_rotary_pos_emb(query, key, cos, sin)))


@every_dtype
def test_qk_norm_rope_ltx(dtype, monkeypatch):
    from diffusers.models.transformers import transformer_ltx as ltx

    said = heard_by_attention(ltx, monkeypatch)
    attention = randomized(ltx.LTXAttention(64, heads=2, kv_heads=2, dim_head=32), dtype)
    x = torch.randn(2, 6, 64, dtype=dtype)
    cos, sin = tables(1, 6, 64)
    attention(x, image_rotary_emb=(cos, sin))
    got = kw.qk_norm_rope(
        attention.to_q(x), attention.to_k(x), attention.norm_q.weight, attention.norm_k.weight,
        cos, sin, attention.norm_q.eps, across_heads=True, exact="diffusers",
    )  # fmt: skip
    for g, expected in zip(got, said[0], strict=True):
        assert torch.equal(g.unflatten(2, (2, 32)), expected)


@every_dtype
def test_qk_norm_rope_wan(dtype, monkeypatch):
    from diffusers.models.transformers import transformer_wan as wan

    said = heard_by_attention(wan, monkeypatch)
    attention = randomized(
        wan.WanAttention(64, heads=2, dim_head=32, processor=wan.WanAttnProcessor()), dtype
    )
    x = torch.randn(2, 6, 64, dtype=dtype)
    # one angle for both elements of a pair, as Wan builds its tables
    cos, sin = (t.repeat_interleave(2, -1) for t in tables(1, 6, 1, 16))
    attention(x, None, None, (cos, sin))
    query, key = (p(x).unflatten(2, (2, 32)) for p in (attention.to_q, attention.to_k))
    got = kw.qk_norm_rope(
        query, key, attention.norm_q.weight, attention.norm_k.weight, cos, sin,
        attention.norm_q.eps, across_heads=True, exact="diffusers",
    )  # fmt: skip
    assert all(map(torch.equal, got, said[0]))
    normed = attention.norm_q(attention.to_q(x)).unflatten(2, (2, 32))
    assert torch.equal(kw.apply_rope(normed, cos, sin, exact="wan"), said[0][0])


@every_dtype
def test_qk_norm_rope_flux(dtype, monkeypatch):
    from diffusers.models.transformers import transformer_flux as flux

    said = heard_by_attention(flux, monkeypatch)
    attention = randomized(flux.FluxAttention(64, heads=2, dim_head=32, eps=1e-6), dtype)
    x = torch.randn(2, 6, 64, dtype=dtype)
    cos, sin = tables(6, 32)
    attention(x, image_rotary_emb=(cos, sin))
    query, key = (p(x).unflatten(2, (2, 32)) for p in (attention.to_q, attention.to_k))
    got = kw.qk_norm_rope(
        query, key, attention.norm_q.weight, attention.norm_k.weight, cos, sin, 1e-6,
        exact="diffusers",
    )  # fmt: skip
    assert all(map(torch.equal, got, said[0]))


@every_dtype
def test_qk_norm_rope_qwen3(dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    query, key = (torch.randn(2, 6, heads, 64, dtype=dtype) for heads in (4, 2))
    norms = [randomized(Qwen3RMSNorm(64, 1e-6), dtype) for _ in "qk"]
    cos, sin = (t.to(dtype) for t in tables(2, 6, 64))
    expected = apply_rotary_pos_emb(
        norms[0](query).transpose(1, 2), norms[1](key).transpose(1, 2), cos, sin
    )
    got = kw.qk_norm_rope(
        query, key, norms[0].weight, norms[1].weight, cos, sin, 1e-6, layout="half",
        exact="transformers",
    )  # fmt: skip
    assert all(torch.equal(g.transpose(1, 2), e) for g, e in zip(got, expected, strict=True))


@every_dtype
def test_a_block_of_ltx(dtype):
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

    block = randomized(LTXVideoTransformerBlock(64, 2, 32, 64), dtype)
    block.attn1, block.attn2, block.ff = Said(), Said(), Said()
    x, temb = torch.randn(2, 6, 64, dtype=dtype), torch.randn(2, 1, 6 * 64, dtype=dtype)
    out = block(x, x, temb)
    table = block.scale_shift_table[None, None] + temb.reshape(2, 1, 6, 64)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table.unbind(2)
    normed = kw.adaln_rmsnorm(x, None, scale, shift, block.norm1.eps, exact="diffusers")
    assert torch.equal(normed, block.attn1.heard)
    x = kw.gated_residual(x, block.attn1.answer, gate, exact="diffusers")
    assert torch.equal(x, block.attn2.heard)
    normed, x = kw.gated_residual_norm(
        x, block.attn2.answer, scale=mlp_scale, shift=mlp_shift, eps=block.norm2.eps,
        exact="diffusers",
    )  # fmt: skip
    assert torch.equal(normed, block.ff.heard)
    assert torch.equal(kw.gated_residual(x, block.ff.answer, mlp_gate, exact="diffusers"), out)


@every_dtype
def test_a_block_of_flux(dtype):
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    block = randomized(FluxTransformerBlock(64, 2, 32), dtype)
    block.ff, block.ff_context = Said(), Said()
    x, temb = torch.randn(2, 6, 64, dtype=dtype), torch.randn(2, 64, dtype=dtype)
    heard, answer = [], torch.randn_like(x)

    class Attention(nn.Module):
        def forward(self, hidden_states, encoder_hidden_states, **_):
            heard.append(hidden_states.clone())
            return answer, encoder_hidden_states

    block.attn = Attention()
    _, out = block(x, torch.randn_like(x), temb)
    modulation = block.norm1.linear(nn.functional.silu(temb))
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6, dim=1)
    normed = kw.adaln_layernorm(x, None, scale, shift, eps=1e-6, exact="diffusers")
    assert torch.equal(normed, heard[0])
    normed, x = kw.gated_residual_norm(
        x, answer, gate, scale=mlp_scale, shift=mlp_shift, kind="layer", exact="diffusers"
    )
    assert torch.equal(normed, block.ff.heard)
    assert torch.equal(kw.gated_residual(x, block.ff.answer, mlp_gate, exact="diffusers"), out)


@every_dtype
def test_a_block_of_wan(dtype):
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    block = randomized(WanTransformerBlock(64, 128, 2, cross_attn_norm=True), dtype)
    block.attn1, block.attn2, block.ffn = Said(), Said(), Said()
    # the table stays in float32, as `_keep_in_fp32_modules` has it
    block.scale_shift_table.data = block.scale_shift_table.float()
    x, temb = torch.randn(2, 6, 64, dtype=dtype), torch.randn(2, 6, 64)
    out = block(x, x, temb, None)
    table = (block.scale_shift_table + temb).chunk(6, dim=1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table
    normed = kw.adaln_layernorm(x, None, scale, shift, eps=block.norm1.eps, exact="wan")
    assert torch.equal(normed, block.attn1.heard)
    norm2 = block.norm2
    normed, x = kw.gated_residual_norm(
        x, block.attn1.answer, gate, norm2.weight, norm2.bias, kind="layer", eps=norm2.eps,
        exact="wan",
    )  # fmt: skip
    assert torch.equal(normed, block.attn2.heard)
    normed, x = kw.gated_residual_norm(
        x, block.attn2.answer, scale=mlp_scale, shift=mlp_shift, kind="layer",
        eps=block.norm3.eps, exact="wan",
    )  # fmt: skip
    assert torch.equal(normed, block.ffn.heard)
    assert torch.equal(kw.gated_residual(x, block.ffn.answer, mlp_gate, exact="wan"), out)
