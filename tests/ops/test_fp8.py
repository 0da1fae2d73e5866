"""Rows in eight bits and their product, held to the reference."""

import pytest
import torch

import kernelwright as kw
from kernelwright.ops import fp8
from kernelwright.ops.fp8 import reference
from kernelwright.ops.fp8.rows import NORM_QUANTIZE, RESIDUAL_NORM_QUANTIZE, RESIDUAL_QUANTIZE

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


@pytest.mark.parametrize("widths", [(48, 100), (96, 256), (7, 640)], ids=str)
def test_joined_rows_have_one_scale_and_an_activation_on_the_right(widths):
    left, x = (rows(torch.bfloat16, 2, 3, n + 8)[..., 8:] for n in widths)
    got, got_scale = fp8.quantize(x, None, "gelu_tanh", left, backend="triton")
    joined = torch.cat([left.float(), torch.nn.functional.gelu(x.float(), approximate="tanh")], -1)
    expected, scale = fp8.quantize(joined, backend="torch")
    assert got.shape == (2, 3, sum(widths))
    torch.testing.assert_close(got_scale, scale, rtol=2**-22, atol=0)
    carried = torch.frexp(expected.float())[0].abs() == 0.5
    assert ((got.float() != expected.float()) & ~carried).sum() <= 2
    same, same_scale = fp8.quantize(x, None, "gelu_tanh", left, backend="torch")
    assert torch.equal(same.float(), expected.float())
    assert torch.equal(same_scale, scale)


def row_ops(width, shape=(2, 4)):
    """Each op that makes eight-bit rows beside others, and arguments for it."""
    x, residual = (
        rows(torch.bfloat16, *shape, width + 8)[..., 8:],
        rows(torch.bfloat16, *shape, width),
    )
    part, wide = rows(torch.bfloat16, shape[0], 1, width), rows(torch.float32, shape[0], 1, width)
    weight = rows(torch.bfloat16, width)
    for kind in ("rms", "layer"):
        yield NORM_QUANTIZE, (x, None, None, wide, wide, kind, 1e-6)
        operands = (residual, x, part, weight, weight, part, None, kind, 1e-6)
        yield RESIDUAL_NORM_QUANTIZE, operands
        yield RESIDUAL_NORM_QUANTIZE, (residual, x, None, weight, None, None, None, kind, 1e-6)
    yield RESIDUAL_QUANTIZE, (residual, x, part)
    frames = rows(torch.bfloat16, shape[0], 2, 1, width)
    yield NORM_QUANTIZE, (x, None, None, frames, None, "rms", 1e-6)


@pytest.mark.usefixtures("rounding_interpreter")
@pytest.mark.parametrize("width", [48, 100, 384, 1024])
def test_a_norm_makes_the_eight_bit_rows_of_the_rows_it_returns(width):
    for op, arguments in row_ops(width):
        *made, eight, scale = op(*arguments, True, backend="triton")
        expected, expected_scale = fp8.quantize(made[0], backend="triton")
        assert torch.equal(eight.view(torch.uint8), expected.view(torch.uint8)), op.name
        assert torch.equal(scale, expected_scale), op.name
        *without, no_rows, no_scale = op(*arguments, False, backend="triton")
        assert all(map(torch.equal, made, without)), op.name
        assert no_rows.numel() == no_scale.numel() == 0


@pytest.mark.usefixtures("rounding_interpreter")
def test_a_norm_with_eight_bit_rows_is_the_norm_without():
    for op, arguments in row_ops(100):
        got, expected = (op(*arguments, True, backend=b) for b in ("triton", "torch"))
        for a, b in zip(got[:-2], expected[:-2], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
        assert torch.equal(expected[-2].float(), fp8.quantize(expected[0])[0].float())
    x, residual, gate = (rows(torch.bfloat16, 2, 3, 64) for _ in range(3))
    plain = kw.gated_residual_norm(residual, x, gate, kind="layer")
    assert all(
        map(
            torch.equal,
            plain,
            RESIDUAL_NORM_QUANTIZE(residual, x, gate, None, None, None, None, "layer", 1e-6, True),
        )
    )


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
    narrow = rows(torch.bfloat16, 50)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        fp8.quantize(rows(), activation="relu")
    with pytest.raises(ValueError, match="up has shape"):
        fp8.quantize(rows(), rows(torch.bfloat16, 2, 3, 50))
    with pytest.raises(ValueError, match="left has shape"):
        fp8.quantize(rows(), left=rows(torch.bfloat16, 2, 4, 50))
    with pytest.raises(ValueError, match="kind is 'group'"):
        NORM_QUANTIZE(rows(), None, None, None, None, "group", 1e-6, True)
    with pytest.raises(ValueError, match="scale has width 50"):
        NORM_QUANTIZE(rows(), None, None, narrow, None, "rms", 1e-6, True)


def test_empty_rows():
    values, scale = fp8.quantize(rows(torch.float32, 4, 16)[:0])
    assert values.shape == (0, 16)
    assert scale.shape == (0, 1)
    for op, arguments in row_ops(64, (2, 0)):
        assert op(*arguments, True, backend="triton")[-2].shape == (2, 0, 64)
