"""gelu beyond what its declaration is held to: where it may write, and which kernel is launched."""

import pytest
import torch
import torch.nn.functional as F

from kernelwright.backends import HOPPER
from kernelwright.backends.triton import interpreting
from kernelwright.ops import gelu
from kernelwright.ops.gelu import cuda
from kernelwright.ops.plan import Call

BACKENDS = ["torch", *(["triton"] if interpreting() else [])]


def planned(shape, dtype=torch.bfloat16, exact="torch", alignment=16, wider=0):
    """What is launched for rows of a shape, the output a part of rows that are `wider`."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    out = torch.empty(*shape[:-1], shape[-1] + wider, dtype=dtype, device="meta")[..., wider:]
    values = {"input": x, "approximate": True, "out": out}
    call = Call(values, op="gelu", exact=exact, target=HOPPER, alignment=alignment)
    return cuda.plan(call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_be_a_part_of_wider_rows(backend):
    x = torch.randn(2, 5, 64)
    joined = torch.full((2, 5, 96), 7.0)
    got = gelu(x, out=joined[..., 32:], backend=backend)
    assert got.data_ptr() == joined[..., 32:].data_ptr()
    torch.testing.assert_close(joined[..., 32:], F.gelu(x, approximate="tanh"))
    assert (joined[..., :32] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_be_the_input(backend):
    x = torch.randn(3, 200)
    expected = gelu(x, False, backend=backend)
    assert gelu(x, False, out=x, backend=backend) is x
    assert torch.equal(x, expected)


def test_exact_is_pytorchs_own_gelu_on_the_cpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(4, 33).to(dtype)
        for approximate, form in ((True, "tanh"), (False, "none")):
            expected = F.gelu(x, approximate=form)
            assert torch.equal(gelu(x, approximate, exact="torch"), expected)


@pytest.mark.parametrize("wider", [0, 3072])
def test_large_bfloat16_rows_are_looked_up_by_as_many_blocks_as_fit(wider):
    launch = planned((1, 4608, 12288), wider=wider)
    assert "gelu_table<" in launch.template
    assert launch.grid == cuda.RESIDENT * HOPPER.multiprocessors
    assert planned((2, 2304, 12288), wider=wider).template == launch.template, "built twice"


@pytest.mark.parametrize(
    "how",
    [
        {"shape": (4608, 12288), "dtype": torch.float16},
        {"shape": (4608, 12288), "dtype": torch.float32},
        {"shape": (4608, 12288), "alignment": 8},
        {"shape": (4608, 12288), "wider": 4},
        {"shape": (4608, 12284)},
        {"shape": (16, 12288)},
    ],
    ids=str,
)
def test_other_rows_are_computed(how):
    launch = planned(**how)
    assert "gelu<" in launch.template
    assert "<false>" in launch.template
    assert launch.grid * launch.block >= how["shape"][0] * how["shape"][1] // 8


def test_what_a_wrong_call_is_told():
    with pytest.raises(ValueError, match="gelu: approximate is 'tanh'"):
        gelu(torch.ones(2, 3), "tanh")
    with pytest.raises(ValueError, match="gelu: out has stride 2 in its last dimension"):
        gelu(torch.ones(2, 3), out=torch.ones(2, 6)[:, ::2])
