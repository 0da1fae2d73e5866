"""Rows with gaps on a GPU, see tests/columns.py."""

import pytest
from columns import hold_forward, hold_gradients

from kernelwright.checking.op_cases import filled
from kernelwright.ops.op import Op, registry

OPS = [op for op in registry().values() if isinstance(op, Op) and not op.internal]


@pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_results_and_gradients(op, backend):
    for case in list(filled(op))[:3]:
        hold_forward(op, case, backend, "cuda")
        if op.backward and backend != "cuda":
            hold_gradients(op, case, backend, "cuda")
