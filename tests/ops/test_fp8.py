"""Rows in eight bits and their product, held to the reference."""

import pytest
import torch

from kernelwright.ops import fp8
from kernelwright.ops.fp8 import reference

LARGEST = 448.0


def rows(dtype=torch.bfloat16, *shape):
    return torch.randn(shape or (2, 3, 100), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["alone", "gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_rounds_as_pytorch_does(activation, gated, dtype):
    x = rows(dtype, 2, 3, 200)[..., 8:108]
    up = rows(dtype, 2, 3, 100).flip(1) if gated else None
    got, got_scale = fp8.quantize(x, up, activation, backend="triton")
    expected, scale = fp8.quantize(x, up, activation, backend="torch")
    assert got.dtype == expected.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got_scale, scale, rtol=2**-22, atol=0)
    # Triton's interpreter forgets to carry where rounding reaches the next power of two
    carried = torch.frexp(expected.float())[0].abs() == 0.5
    apart = (got.float() != expected.float()) & ~carried
    # an activation may differ in its last bit, and so fall on the other side of a tie
    assert apart.sum() <= (0 if activation == "none" and up is None else 2)


def test_the_largest_element_of_a_row_becomes_the_largest_number():
    values, scale = fp8.quantize(rows())
    assert (values.float().abs().amax(-1) == LARGEST).all()
    assert torch.equal(scale[..., 0], rows().float().abs().amax(-1) * (1 / LARGEST))


def test_rows_of_zeros_stay_zeros_and_what_is_no_number_stays_none():
    x = rows(torch.float32, 3, 16)
    x[0], x[1, 3] = 0, torch.nan
    values, scale = fp8.quantize(x)
    y = values.float() * scale
    assert (y[0] == 0).all()
    assert y[1].isnan().any()
    assert y[2].isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_that_of_the_values_the_rows_stand_for(biased):
    x, weight = rows(torch.bfloat16, 2, 5, 32), rows(torch.bfloat16, 48, 32)
    bias = rows(torch.bfloat16, 48) if biased else None
    kept, weight_scale = fp8.quantize_weight(weight)
    values, scale = fp8.quantize(x)
    got = fp8.product(values, scale, kept, weight_scale, bias, torch.bfloat16)
    truth = (values.double() * scale) @ (kept.double() * weight_scale).T
    truth = truth if bias is None else truth + bias.double()
    assert got.shape == (2, 5, 48)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), truth, rtol=2**-8, atol=1e-4)


def test_the_error_is_what_three_bits_of_mantissa_leave():
    x, weight = rows(torch.float32, 384, 512).split([256, 128])
    result = fp8.product(*fp8.quantize(x), *fp8.quantize_weight(weight), None, torch.float32)
    truth = x.double() @ weight.double().T
    error = (result - truth).norm() / truth.norm()
    assert 0.03 < error < 0.045


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="activation is 'relu'"):
        fp8.quantize(rows(), activation="relu")
    with pytest.raises(ValueError, match="up has shape"):
        fp8.quantize(rows(), rows(torch.bfloat16, 2, 3, 50))


def test_empty_rows():
    values, scale = fp8.quantize(rows(torch.float32, 4, 16)[:0])
    assert values.shape == (0, 16)
    assert scale.shape == (0, 1)
