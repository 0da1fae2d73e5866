"""The references are right: in every dtype as close to float64 as eager PyTorch is."""

import pytest
import torch
from declared import every_case_in_turn, every_chain, every_chain_in_turn
from numerics import as_tuple, hold_case, run

from kernelwright.checking import promises
from kernelwright.ops.case import Inputs


@every_chain()
def test_the_reference_and_its_eager_chains_are_the_same_function(op, case, chain):
    """The bar hangs on it: were they not, the error of eager would excuse anything."""
    promises.same_function(op, chain, case, "cpu")


@every_case_in_turn()
def test_the_reference_is_as_close_to_float64_as_eager(op, case, dtype):
    hold_case(op, case, dtype, lambda arguments: op.call(arguments, backend="torch"))


@every_chain_in_turn()
def test_exact_on_the_cpu_is_the_eager_chain_and_computes_what_the_reference_does(
    op, case, chain, dtype
):
    arguments = case.arguments(Inputs(dtype))
    eager = as_tuple(run(op, op.exact[chain], arguments))
    if any(e.dtype != dtype for e in eager):
        with pytest.raises(ValueError, match=f"^{op.name}: exact is '{chain}'.* promotes"):
            op.call(arguments, exact=chain)
        return
    got = hold_case(op, case, dtype, lambda arguments: op.call(arguments, exact=chain))
    assert all(map(torch.equal, as_tuple(got), eager))
