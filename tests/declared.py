"""What the registry declares, as pytest parameters: an op is tested by being declared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelwright.ops.case import Case, Inputs
from kernelwright.ops.op import Composite, Op, registry

DTYPES = [
    pytest.param(d, id=str(d).removeprefix("torch."))
    for d in (torch.float16, torch.bfloat16, torch.float32)
]
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


def small(op: Op | Composite) -> Iterator[Case]:
    return (c for c in op.cases if not c.large)


def full(op: Op | Composite) -> Case:
    """The smallest case that has rows of some width and leaves the fewest tensors out."""

    def rank(case: Case) -> tuple[int, int]:
        given = tensors(case.arguments(Inputs(torch.float32)))
        return -len(given), sum(t.numel() for t in given.values())

    return min((c for c in small(op) if _rows(c)), key=rank)


def _rows(case: Case) -> bool:
    given = tensors(case.arguments(Inputs(torch.float32))).values()
    return all(t.numel() and t.shape[-1] >= 8 for t in given)


def tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {n: a for n, a in arguments.items() if isinstance(a, Tensor)}
