"""GELU(gate) * up of two tensors: the kernel of geglu, its two halves apart."""

import pytest
import torch
from declared import DTYPES
from numerics import as_good_as_eager, errors_over_draws, in_eager, in_float64

from kernelwright.backends.triton import interpreting
from kernelwright.ops import geglu
from kernelwright.ops.case import Inputs
from kernelwright.ops.glu import GELU_MUL

DEVICE = "cpu" if interpreting() else "cuda"
BACKENDS = ["triton"] if interpreting() else ["triton", "cuda"]
cases = pytest.mark.parametrize("case", GELU_MUL.cases, ids=lambda c: c.name)


@pytest.mark.usefixtures("rounding_interpreter")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@cases
def test_it_is_as_close_to_float64_as_eager_and_has_the_bits_of_geglu(case, dtype, backend):
    def draw(seed):
        arguments = case.arguments(Inputs(dtype, DEVICE, seed))
        return in_eager(GELU_MUL, arguments), in_float64(GELU_MUL, arguments)

    arguments = case.arguments(Inputs(dtype, DEVICE))
    got = GELU_MUL.call(arguments, backend=backend)
    eager, truth = draw(0)
    as_good_as_eager(got, truth, eager, errors_over_draws(draw, dtype))
    packed = torch.cat([arguments["gate"], arguments["up"]], dim=-1)
    form = arguments["approximate"]
    assert torch.equal(got, geglu(packed, approximate=form, gate="first", backend=backend))


def test_it_is_a_step_of_layers_and_no_public_op():
    from kernelwright import ops

    assert "gelu_mul" not in ops.__all__
    assert "gelu_mul" not in ops.registry()


def test_tensors_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"gelu_mul: up has shape \[3, 8\], gate has \[3, 16\]"):
        GELU_MUL(torch.ones(3, 16), torch.ones(3, 8), True)
