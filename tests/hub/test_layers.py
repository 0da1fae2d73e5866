"""Layers of the Hub package: without state, and each gives what the class it stands for does."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from numerics import as_good_as_eager, errors_over_draws
from torch import nn

from kernelwright import hub
from kernelwright.hub import layer_classes, layers
from kernelwright.inject.recipes._recipe import full_name

EVERY = [getattr(layers, name) for name in layers.__all__]


def test_every_class_in_the_mapping_has_its_layer():
    mapped = hub.mapping(repo_id="kernelwright/ltx-kernels")
    assert {r.layer_name for on in mapped.values() for r in on.values()} <= set(layers.__all__)
    known = {*layer_classes.TRANSFORMERS, *layer_classes.MLPS, *layer_classes.CLASSES}
    assert set(mapped) == known


@pytest.mark.parametrize(("layer", "known"), layer_classes.CLASSES.items())
def test_a_layer_takes_the_arguments_of_its_class(layer, known):
    place, _, name = known.rpartition(".")
    own = getattr(importlib.import_module(place), name)
    assert full_name(own) == known
    wanted, given = (
        [(p.name, p.kind, p.default) for p in inspect.signature(c.forward).parameters.values()]
        for c in (own, getattr(layers, layer))
    )
    assert given == wanted


@pytest.mark.parametrize("layer", EVERY, ids=lambda c: c.__name__)
def test_layers_have_no_state_compile_and_have_gradients(layer):
    assert layer.__init__ is nn.Module.__init__
    added = {n for n, _ in inspect.getmembers(layer)} - {
        n for n, _ in inspect.getmembers(nn.Module)
    }
    assert added == {"can_torch_compile", "has_backward"}
    assert layer.can_torch_compile
    assert layer.has_backward


def call(layer, module, *args, **kwargs):
    return getattr(layers, layer).forward(module, *args, **kwargs)


def in_float64(norm, x):
    """The norm itself: its class may compute in float32 whatever it is given."""
    shape = getattr(norm, "normalized_shape", x.shape[-1:])
    weight, bias = (
        None if p is None else p.double() for p in (norm.weight, getattr(norm, "bias", None))
    )
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x.double(), shape, weight, bias, norm.eps)
    rows = F.rms_norm(x.double(), shape, weight, norm.eps or torch.finfo(torch.float32).eps)
    return rows if bias is None else rows + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_give_the_dtype_of_their_class_and_are_as_close_to_float64(dtype):
    from diffusers.models.normalization import FP32LayerNorm, RMSNorm

    def rows(seed):
        return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)

    x = rows(0)
    for layer, module in (
        ("DiffusersRMSNorm", RMSNorm(16, eps=1e-6)),
        ("DiffusersRMSNorm", RMSNorm(16, eps=1e-6, bias=True).to(torch.bfloat16)),
        ("DiffusersRMSNorm", RMSNorm(16, eps=1e-6, elementwise_affine=False)),
        ("TorchRMSNorm", nn.RMSNorm(16, eps=1e-5, dtype=dtype)),
        ("TorchRMSNorm", nn.RMSNorm((5, 16), dtype=dtype)),
        ("LayerNorm", nn.LayerNorm(16, dtype=dtype)),
        ("LayerNorm", FP32LayerNorm(16, elementwise_affine=False)),
    ):
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        want = module(x)
        got = call(layer, module, x)
        assert got.dtype == want.dtype, module
        bars = errors_over_draws(
            lambda s, m=module: (m(rows(s)), in_float64(m, rows(s))), want.dtype
        )
        as_good_as_eager(got, in_float64(module, x), want, bars)


def test_adaptive_norms_give_what_their_classes_do():
    from diffusers.models import normalization as n

    x, emb = torch.randn(2, 5, 16), torch.randn(2, 16)
    continuous = n.AdaLayerNormContinuous(16, 16, norm_type="rms_norm")
    for name, module, arguments in (
        ("AdaLayerNorm", n.AdaLayerNorm(16, output_dim=32, chunk_dim=1), {"x": x, "temb": emb}),
        ("AdaLayerNorm", n.AdaLayerNorm(16), {"x": x, "temb": emb[0]}),
        ("AdaLayerNormZero", n.AdaLayerNormZero(16), {"x": x, "emb": emb}),
        ("AdaLayerNormZeroSingle", n.AdaLayerNormZeroSingle(16), {"x": x, "emb": emb}),
        ("SD35AdaLayerNormZeroX", n.SD35AdaLayerNormZeroX(16), {"hidden_states": x, "emb": emb}),
        (
            "AdaLayerNormContinuous",
            n.AdaLayerNormContinuous(16, 16),
            {"x": x, "conditioning_embedding": emb},
        ),
        ("AdaLayerNormContinuous", continuous, {"x": x, "conditioning_embedding": emb}),
    ):
        torch.testing.assert_close(call(name, module, **arguments), module(**arguments))


def test_gated_units_give_what_their_classes_do():
    from diffusers.models.activations import GEGLU, SwiGLU
    from diffusers.models.attention import FeedForward

    x = torch.randn(3, 16)
    for name, module in (
        ("GEGLU", GEGLU(16, 8)),
        ("SwiGLU", SwiGLU(16, 8)),
        *(
            ("GEGLUMLP", FeedForward(16, activation_fn=f).eval())
            for f in ("geglu", "swiglu", "gelu-approximate", "gelu", "linear-silu")
        ),
    ):
        torch.testing.assert_close(call(name, module, x), module(x))
    first, second = x.chunk(2, dim=-1)
    empty = nn.Module()
    for name, gate in (
        ("SiluAndMul", F.silu(first)),
        ("GeluAndMul", F.gelu(first)),
        ("GeluTanhAndMul", F.gelu(first, approximate="tanh")),
    ):
        torch.testing.assert_close(call(name, empty, x), gate * second)


def gemma_mlp(activation):
    from transformers import GemmaConfig
    from transformers.activations import ACT2FN
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    mlp = GemmaMLP(GemmaConfig(hidden_size=16, intermediate_size=24))
    mlp.act_fn = ACT2FN[activation] if isinstance(activation, str) else activation
    return mlp


GELUS = ["gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu", "gelu_python"]


@pytest.mark.parametrize(
    "activation", [*GELUS, nn.GELU(), nn.GELU(approximate="tanh"), "relu", "quick_gelu"], ids=str
)
def test_a_gelu_gated_mlp_and_its_gradients_are_those_of_gemma(activation):
    mlp = gemma_mlp(activation)
    x = torch.randn(3, 5, 16, requires_grad=True)
    got, want = call("GemmaMLP", mlp, x), mlp(x)
    torch.testing.assert_close(got, want)
    inputs = [x, *mlp.parameters()]
    gradients = (torch.autograd.grad(y.square().sum(), inputs) for y in (got, want))
    for ours, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


def test_a_gelu_gated_mlp_rounds_once_where_gemma_rounds_twice():
    mlp = gemma_mlp("gelu_pytorch_tanh").bfloat16()
    mlp.down_proj = nn.Identity()
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    gate, up = mlp.gate_proj(x).double(), mlp.up_proj(x).double()
    got, want = call("GemmaMLP", mlp, x), mlp(x)
    truth = F.gelu(gate, approximate="tanh") * up
    as_good_as_eager(got, truth, want)
    assert (got - truth).abs().mean() < (want - truth).abs().mean()


@pytest.mark.parametrize(("layer", "activation"), [("SwiGLUMLP", "silu"), ("GemmaMLP", "gelu_new")])
def test_a_hook_on_the_activation_of_an_mlp_is_still_called(layer, activation):
    mlp, seen = gemma_mlp(activation), []
    mlp.act_fn.register_forward_hook(lambda *a: seen.append(1))
    call(layer, mlp, torch.randn(3, 16))
    assert seen


@pytest.mark.parametrize("activation", GELUS)
def test_activations_give_what_their_classes_do(activation):
    from transformers.activations import ACT2FN

    module, x = ACT2FN[activation], torch.randn(3, 16)
    layer = layer_classes.TRANSFORMERS[module.kernel_layer_name]
    assert layer_classes.is_served(module.kernel_layer_name, module)
    torch.testing.assert_close(call(layer, module, x), module(x))


def test_rotary_embedding_turns_as_llama_does():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angle = torch.rand(2, 5, 4).repeat(1, 1, 2)
    for tables in ((angle.cos(), angle.sin()), (angle.double().cos(), angle.double().sin())):
        got, want = (
            call("RotaryPosEmb", nn.Module(), q, k, *tables),
            apply_rotary_pos_emb(q, k, *tables),
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("family", "served"),
    [("llama", True), ("gemma", True), ("olmo", False), ("gpt_oss", False), ("nanochat", False)],
)
def test_a_family_that_turns_otherwise_keeps_its_rotary_embedding(family, served):
    own = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert layer_classes.is_served("rotary_pos_emb", own.apply_rotary_pos_emb) is served
