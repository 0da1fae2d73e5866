"""gelu has PyTorch's bits for every number there is, by look-up and by computation."""

import pytest
import torch
import torch.nn.functional as F

from kernelwright.ops import gelu
from kernelwright.ops.gelu import cuda

FORMS = [(True, "tanh"), (False, "none")]


def bits(x):
    """As integers, all NaN alike: which of them comes out is nobody's promise."""
    return torch.where(x.isnan(), torch.nan, x).view(
        torch.int16 if x.itemsize == 2 else torch.int32
    )


def every_number(dtype, rows=1):
    """[rows, 65536]: each bit pattern of a 16-bit dtype in each row."""
    numbers = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers.expand(rows, -1).contiguous()


@pytest.mark.parametrize(("approximate", "form"), FORMS)
@pytest.mark.parametrize("rows", [1, 1 + cuda.TABLE_ELEMENTS // (1 << 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_has_pytorchs_bits(dtype, rows, approximate, form):
    x = every_number(dtype, rows)
    got = gelu(x, approximate, exact="torch", backend="cuda")
    assert torch.equal(bits(got), bits(F.gelu(x, approximate=form)))


@pytest.mark.parametrize(("approximate", "form"), FORMS)
def test_float32_of_every_magnitude_has_pytorchs_bits(approximate, form):
    # every 251st pattern, zeros, subnormals, infinities and NaN among them
    patterns = torch.arange(-(1 << 31), 1 << 31, 251, device="cuda")
    x = patterns[: patterns.numel() // 8 * 8].to(torch.int32).view(torch.float32)
    got = gelu(x, approximate, exact="torch", backend="cuda")
    assert torch.equal(bits(got), bits(F.gelu(x, approximate=form)))


@pytest.mark.parametrize("rows", [171, 4608])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_part_of_wider_rows_is_written_and_nothing_else(backend, batch, rows):
    x = torch.randn(batch, rows, 12288, device="cuda", dtype=torch.bfloat16)
    joined = torch.full((batch, rows, 3072 + 12288), 7.0, device="cuda", dtype=torch.bfloat16)
    got = gelu(x, out=joined[..., 3072:], backend=backend)
    assert got.data_ptr() == joined.data_ptr() + 3072 * 2
    assert torch.equal(joined[..., 3072:], gelu(x, backend=backend))
    assert (joined[..., :3072] == 7).all()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", [(5376, 8192), (3, 8192)])
def test_the_input_may_be_overwritten(backend, shape):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    expected = gelu(x, backend=backend)
    assert gelu(x, out=x, backend=backend) is x
    assert torch.equal(x, expected)


def test_heads_that_lie_apart_are_looked_up_too():
    x = torch.randn(2, 24, 1024, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    got = gelu(x, exact="torch", backend="cuda")
    assert torch.equal(got, F.gelu(x, approximate="tanh"))
