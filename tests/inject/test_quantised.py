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


def replace(model, made):
    for name, layer in linear_layers(model).items():
        new = made(layer.in_features, layer.out_features, bias=layer.bias is not None)
        new.load_state_dict(layer.state_dict())
        model.set_submodule(name, new.to("cpu"))  # quantises


def linear_layers(model):
    return {name: m for name, m in model.named_modules() if type(m) is nn.Linear}


def check(quantise):
    model = models.build("ltx-video", tiny=True, dtype=torch.float32)
    inputs = models.inputs("ltx-video", tiny=True, dtype=torch.float32)
    plain = run(model, inputs)
    quantise(model)
    expected = run(model, inputs)
    assert not same(expected, plain)
    with kw.injected(model) as report:
        assert all(same(run(model, inputs), expected) for _ in range(2))
    assert report.replaced
    assert not report.problems
    assert same(run(model, inputs), expected)


def test_weights_that_are_a_tensor_subclass():
    check(rounded)


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
    ],
)
@pytest.mark.filterwarnings("ignore")  # their own
def test_layers_of_a_quantiser(quantise, package):
    pytest.importorskip(package)
    check(quantise)
