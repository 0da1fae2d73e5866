"""The declared ops and cases as pytest parameters: declaring an op is enough to test it."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
from everything import EVERYTHING

from kernelwright.checking import op_cases
from kernelwright.checking.op_cases import full, small, tensors
from kernelwright.ops.op import Op, registry

__all__ = [
    "ALL",
    "DTYPES",
    "OPS",
    "every_case",
    "every_case_in_turn",
    "every_chain",
    "every_chain_in_turn",
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


def every_case_in_turn(ops: list[Any] = ALL, dtypes: list[Any] = DTYPES) -> Any:
    """Each op with each of its small cases: the fullest in every dtype, the others in one each,
    which take turns. On a GPU all run in all dtypes."""
    cases = [((op, c), f"{op.name}-{c.name}") for op in ops for c in small(op)]
    return pytest.mark.parametrize(("op", "case", "dtype"), _in_turn(cases, dtypes))


def every_chain_in_turn(dtypes: list[Any] = DTYPES) -> Any:
    """Each op with each of its small cases and eager chains, in dtypes as above."""
    return pytest.mark.parametrize(("op", "case", "chain", "dtype"), _in_turn(_chains(), dtypes))


def every_chain() -> Any:
    """Each op with each of its small cases and each eager chain it can reproduce."""
    found = [pytest.param(*values, id=name) for values, name in _chains()]
    return pytest.mark.parametrize(("op", "case", "chain"), found)


def _chains() -> list[tuple[tuple[Any, ...], str]]:
    return [
        ((op, c, chain), f"{op.name}-{c.name}-{chain}")
        for op in ALL
        for c in small(op)
        for chain in op.exact
    ]


def _in_turn(cases: Iterable[tuple[tuple[Any, ...], str]], dtypes: list[Any]) -> list[Any]:
    found, turn = [], count()
    for values, name in cases:
        op, case, *_ = values
        whole = EVERYTHING or case is full(op)
        for dtype in dtypes if whole else [dtypes[next(turn) % len(dtypes)]]:
            found.append(pytest.param(*values, *dtype.values, id=f"{name}-{dtype.id}"))
    return found
