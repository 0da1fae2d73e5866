"""The Triton kernels, through the interpreter: right in every case, dtype and corner."""

import pytest
import torch
from declared import OPS, every_case_in_turn, every_op, full, tensors
from numerics import as_good_as_eager, as_tuple, hold_case, in_eager, in_float64

from kernelwright.backends.triton import interpreting
from kernelwright.checking import promises
from kernelwright.ops.case import Inputs
from kernelwright.ops.op import registry

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="a GPU is here: tests/gpu runs the kernels"),
    pytest.mark.usefixtures("rounding_interpreter"),
]
TRITON = [op for op in registry().values() if "triton" in op.backends]
INPLACE = [op for op in OPS if op.inplace and op in TRITON]
# numpy says so where a GPU goes on in silence: exp(89) is infinite, inf - inf is NaN
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@quiet
@every_case_in_turn(TRITON)
def test_a_kernel_is_as_close_to_float64_as_eager(op, case, dtype):
    hold_case(op, case, dtype, lambda arguments: op.call(arguments, backend="triton"))


@every_case_in_turn(INPLACE)
def test_inplace_writes_what_the_call_returns_where_the_input_lies(op, case, dtype):
    arguments = case.arguments(Inputs(dtype))
    fresh = as_tuple(op.call(arguments, backend="triton"))
    given = case.arguments(Inputs(dtype))
    changed = as_tuple(op.call(given, backend="triton", inplace=True))
    for name, new, there in zip(op.inplace, fresh, changed, strict=True):
        assert there is given[name]
        assert torch.equal(new, there)
    for name in tensors(given).keys() - set(op.inplace):
        assert torch.equal(given[name], arguments[name]), f"{name} was changed"


@quiet
@every_op(TRITON)
def test_a_bad_row_stays_in_its_row(op):
    promises.bad_row(op, "triton", "cpu")


@quiet
@every_op(TRITON)
def test_float16_values_whose_square_overflows_are_right(op):
    case = full(op)
    arguments = case.arguments(Inputs(torch.float16))
    first = next(iter(tensors(arguments)))
    arguments[first] = arguments[first] * 1000
    assert arguments[first].square().isinf().any()
    got = op.call(arguments, backend="triton")
    as_good_as_eager(got, in_float64(op, arguments), in_eager(op, arguments))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_op([op for op in OPS if op in TRITON])
def test_other_tensors_may_be_in_float32(op, dtype):
    """Weights, tables and modulation in float32 beside rows in 16 bits, where the op accepts it."""
    arguments = mixed(op, full(op).arguments(Inputs(dtype)))
    reference = op.call(arguments, backend="torch")
    got = op.call(arguments, backend="triton")
    assert all(g.dtype == r.dtype for g, r in zip(as_tuple(got), as_tuple(reference), strict=True))
    as_good_as_eager(got, in_float64(op, arguments), in_eager(op, arguments))


def mixed(op, arguments):
    """Every tensor but the rows in float32, in as many groups as the op's checks allow."""
    wide = {n: t.float() for n, t in list(tensors(arguments).items())[1:]}
    while wide:
        try:
            op.validate(tuple((arguments | wide)[n] for n in op.arguments))
            return arguments | wide
        except TypeError as error:
            refused = [n for n in wide if f" {n} is" in str(error)]
            if not refused:
                raise
            del wide[refused[0]]
    return arguments
