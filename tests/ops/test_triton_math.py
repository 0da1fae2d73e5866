"""The accurate functions for Triton kernels: a few ulps in float32, over their whole range."""

import math

import pytest
import torch
from numerics import ulp

from kernelwright.backends.triton import interpreting

triton = pytest.importorskip("triton")
if not interpreting():
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402

from kernelwright.ops import triton_math  # noqa: E402
from kernelwright.ops.triton_math import exp, sigmoid, tanh  # noqa: E402


@triton.jit
def kernel(x, y, n, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < n, other=0.0)
    if WHICH == "exp":
        b_y = exp(b_x)
    elif WHICH == "sigmoid":
        b_y = sigmoid(b_x)
    else:
        b_y = tanh(b_x)
    tl.store(y + o, b_y, mask=o < n)


def of(which, x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), which, 1024)
    return y


# the largest error, and the range outside of which the result is subnormal or constant
BOUNDS = {"exp": (2.0, -87.0, 88.7), "sigmoid": (3.0, -87.0, 30.0), "tanh": (2.0, -12.0, 12.0)}


@pytest.mark.parametrize("which", BOUNDS)
def test_it_is_accurate_over_its_whole_range(which):
    most, low, high = BOUNDS[which]
    x = torch.cat((torch.linspace(low, high, 20000), torch.linspace(-1, 1, 4001)))
    truth = getattr(torch, which)(x.double())
    error = (of(which, x).double() - truth).abs() / ulp(truth, torch.float32)
    assert error.max() < most


@pytest.mark.parametrize("which", BOUNDS)
def test_limits_and_nan_are_those_of_pytorch(which):
    x = torch.tensor([math.inf, -math.inf, math.nan, 200.0, -200.0, 0.0, -0.0])
    expected = getattr(torch, which)(x)
    assert torch.equal(of(which, x).nan_to_num(-7.0, 9e9), expected.nan_to_num(-7.0, 9e9))


def test_all_of_them_are_tried():
    functions = {n for n, f in vars(triton_math).items() if hasattr(f, "fn")}
    assert functions == set(BOUNDS)
