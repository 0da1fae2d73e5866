"""Models whose linear layers a quantiser replaced give, injected, the bits that they have without.

The quantisers themselves are no part of the development environment; where they are installed, they
are tested, too. A tensor subclass of our own stands for their weights everywhere.
"""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import kernelwright as kw
from inject.harness import run, same
from kernelwright import models


class Rounded(torch.Tensor):
    """Eight-bit integers and a scale that pass for the weight they stand for, as weights of torchao
    do: a wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, facts, size, stride):
        return cls(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].integers.clone(), args[0].scale.clone())

        def whole(value):
            return value.integers * value.scale if isinstance(value, cls) else value

        return func(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs or {}))


def rounded(model):
    for layer in linear_layers(model).values():
        scale = layer.weight.detach().abs().max() / 127
        integers = (layer.weight.detach() / scale).round().to(torch.int8)
        layer.weight = nn.Parameter(Rounded(integers, scale), requires_grad=False)


def torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def quanto(model):
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)


def bitsandbytes_4bit(model):
    from bitsandbytes.nn import Linear4bit

    replace(model, lambda inputs, outputs, **bias: Linear4bit(inputs, outputs, **bias))


def bitsandbytes_8bit(model):
    from bitsandbytes.nn import Linear8bitLt

    replace(model, lambda *sizes, **bias: Linear8bitLt(*sizes, **bias, has_fp16_weights=False))


def gguf(model):
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType.Q8_0
    for name, layer in linear_layers(model).items():
        if layer.in_features % 32:  # of a block
            continue
        new = GGUFLinear(layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype)
        integers = torch.from_numpy(quants.quantize(layer.weight.detach().numpy(), kind))
        new.weight, new.bias = GGUFParameter(integers, quant_type=kind), layer.bias
        model.set_submodule(name, new)


def replace(model, made):
    for name, layer in linear_layers(model).items():
        new = made(layer.in_features, layer.out_features, bias=layer.bias is not None)
        new.load_state_dict(layer.state_dict())
        model.set_submodule(name, new.to("cpu"))  # quantises


def close(a, b):
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(a, b, strict=True))


def linear_layers(model):
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear}


# by a recipe, and as programs
@pytest.fixture(params=["ltx-video", "flux2-dev"])
def name(request):
    return request.param


def check(quantise, name):
    model = models.build(name, tiny=True, dtype=torch.float32)
    inputs = models.inputs(name, tiny=True, dtype=torch.float32)
    plain = run(model, inputs)
    quantise(model)
    expected = run(model, inputs)
    assert not same(expected, plain)
    with kw.injected(model) as report:
        assert all(same(run(model, inputs), expected) for _ in range(2))
    assert report.replaced
    assert all(line.kernels for line in report.blocks)
    assert not report.problems
    assert same(run(model, inputs), expected)


def test_weights_that_are_a_tensor_subclass(name):
    check(rounded, name)


@pytest.mark.parametrize("numerics", ["exact", "fused"])
@torch.no_grad()
def test_another_quantised_weight_is_read_at_once(name, numerics):
    model = models.build(name, tiny=True, dtype=torch.float32)
    inputs = models.inputs(name, tiny=True, dtype=torch.float32)
    rounded(model)
    layer = next(m for n, m in linear_layers(model).items() if "block" in n)
    with kw.injected(model, numerics=numerics):
        before = [run(model, inputs) for _ in range(3)][-1]
        layer.weight.scale.mul_(2)
        written = run(model, inputs)
        layer.weight = nn.Parameter(
            Rounded(layer.weight.integers.roll(1, 0), layer.weight.scale), requires_grad=False
        )
        exchanged = run(model, inputs)
    for result, other in ((written, before), (exchanged, written)):
        assert not same(result, other)
    want = run(model, inputs)
    assert same(exchanged, want) if numerics == "exact" else close(exchanged, want)


@pytest.mark.parametrize(
    ("quantise", "package"),
    [
        pytest.param(
            torchao, "torchao", marks=pytest.mark.compatibility("torchao", needs="torchao")
        ),
        pytest.param(
            quanto,
            "optimum.quanto",
            marks=pytest.mark.compatibility("quanto", needs="optimum-quanto"),
        ),
        pytest.param(
            bitsandbytes_4bit,
            "bitsandbytes",
            marks=pytest.mark.compatibility("bitsandbytes 4-bit", needs="bitsandbytes"),
        ),
        pytest.param(
            bitsandbytes_8bit,
            "bitsandbytes",
            marks=pytest.mark.compatibility("bitsandbytes 8-bit", needs="bitsandbytes"),
        ),
        pytest.param(gguf, "gguf", marks=pytest.mark.compatibility("GGUF", needs="gguf")),
    ],
)
@pytest.mark.filterwarnings("ignore")  # their own
def test_layers_of_a_quantiser(quantise, package, name):
    pytest.importorskip(package)
    check(quantise, name)
