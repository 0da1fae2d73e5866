"""Gradients by kernels on a GPU: as close to float64 as eager's, and the same in every run."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here: tests/gpu", allow_module_level=True)

from declared import DTYPES, OPS, every_case, every_op

from kernelwright.checking.gradients import gradients, hold_gradients, leaves
from kernelwright.ops.case import Inputs

KERNELS = [op for op in OPS if op.backward is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@every_case(KERNELS)
def test_gradients_are_as_close_to_float64_as_those_of_eager(op, case, dtype):
    hold_gradients(op, case, dtype, "triton", "cuda")


@every_op(KERNELS)
def test_gradients_at_the_shapes_of_models_repeat_and_are_right(op):
    for case in (c for c in op.cases if c.large):
        given, wanted = leaves(case.arguments(Inputs(torch.bfloat16, "cuda")))
        outputs = op.call(given, backend="triton")
        first = gradients(outputs, wanted, retain_graph=True)
        assert all(map(torch.equal, first, gradients(outputs, wanted))), case.name
        del outputs
        expected = gradients(op.call(given, backend="torch"), wanted)
        for name, got, e in zip(wanted, first, expected, strict=True):
            # both sum in float32: one rounding of the result, and where thousands of rows are
            # added, the rounding of the partial sums
            bound = 2**-7 * e.abs() + 2**-12 * e.abs().max()
            assert ((got - e).abs() <= bound).all(), f"{case.name}: {name}"
