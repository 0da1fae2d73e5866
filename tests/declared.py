"""The declared ops and cases as pytest parameters: declaring an op is enough to test it."""

from typing import Any

import pytest

from kernelwright.checking import op_cases
from kernelwright.checking.op_cases import full, small, tensors
from kernelwright.ops.op import Op, registry

__all__ = [
    "ALL",
    "DTYPES",
    "OPS",
    "every_case",
    "every_chain",
    "every_op",
    "full",
    "small",
    "tensors",
]

DTYPES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in op_cases.DTYPES]
ALL = list(registry().values())
OPS = [op for op in ALL if isinstance(op, Op)]


def every_op(ops: list[Any] = ALL) -> Any:
    return pytest.mark.parametrize("op", ops, ids=[op.name for op in ops])


def every_case(ops: list[Any] = ALL) -> Any:
    """Each op with each of its small cases."""
    return pytest.mark.parametrize(
        ("op", "case"),
        [pytest.param(op, c, id=f"{op.name}-{c.name}") for op in ops for c in small(op)],
    )


def every_chain() -> Any:
    """Each op with each of its small cases and each eager chain it can reproduce."""
    return pytest.mark.parametrize(
        ("op", "case", "chain"),
        [
            pytest.param(op, c, chain, id=f"{op.name}-{c.name}-{chain}")
            for op in ALL
            for c in small(op)
            for chain in op.exact
        ],
    )
