"""Rows with gaps, see tests/columns.py."""

import pytest
from columns import hold_forward, hold_gradients
from everything import share

from kernelwright.checking.op_cases import filled
from kernelwright.ops.op import Op, registry

OPS = [op for op in registry().values() if isinstance(op, Op) and not op.internal]
CASES = [(op, case) for op in OPS for case in share(filled(op), 3)]
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


def named(value):
    return getattr(value, "name", None)


@BACKENDS
@pytest.mark.parametrize(("op", "case"), CASES, ids=named)
def test_results_are_laid_out_as_promised(op, case, backend):
    hold_forward(op, case, backend)


@BACKENDS
@pytest.mark.parametrize(("op", "case"), [(o, c) for o, c in CASES if o.backward], ids=named)
def test_gradients_are_those_of_dense_rows(op, case, backend):
    hold_gradients(op, case, backend)
