"""Selects cases of an op for a check."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def small(op: Op | Composite) -> Iterator[Case]:
    return (c for c in op.cases if not c.large)


def filled(op: Op | Composite) -> Iterator[Case]:
    """The small cases in which no tensor is empty."""
    for case in small(op):
        given = tensors(case.arguments(Inputs(torch.float32, "meta"))).values()
        if all(t.numel() for t in given):
            yield case


@functools.cache
def full(op: Op | Composite) -> Case:
    """The smallest case among those that pass the most tensors, in rows of 8 elements or more."""

    def rank(case: Case) -> tuple[int, int]:
        given = tensors(case.arguments(Inputs(torch.float32)))
        return -len(given), sum(t.numel() for t in given.values())

    return min((c for c in small(op) if _rows(c)), key=rank)


def _rows(case: Case) -> bool:
    given = tensors(case.arguments(Inputs(torch.float32))).values()
    return all(t.numel() and t.shape[-1] >= 8 for t in given)


def tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    return {n: a for n, a in arguments.items() if isinstance(a, Tensor)}
