"""Every kernel that the declared cases launch, planned on meta tensors without a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch

from ..backends import Target, Unsupported
from ..ops.case import Case, Inputs
from ..ops.op import Composite, Op, registry
from ..ops.plan import Call
from ..ops.rows import with_dense_rows

# one GPU of each architecture, with its number of multiprocessors
TARGETS = {
    "sm_75": Target((7, 5), 40),
    "sm_80": Target((8, 0), 108),
    "sm_89": Target((8, 9), 142),
    "sm_90": Target((9, 0), 132),
    "sm_100": Target((10, 0), 148),
    "sm_120": Target((12, 0), 170),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """A launch, the call it was planned for, and its name in reports."""

    name: str
    launch: Any
    call: Call
    dtype: torch.dtype
    large: bool


def kernels(
    backend: str, arch: str, everything: bool, ops: Iterable[Op | Composite] | None = None
) -> Iterator[Kernel]:
    """The kernels of these ops, by default of all, for an architecture. `everything`: of each case,
    shapes of models in every dtype and also for unaligned addresses; otherwise of the largest case
    of each op, chain and dtype."""
    for op in registry().values() if ops is None else ops:
        if not isinstance(op, Op) or backend not in op.backends:
            continue
        cases = [c for c in op.cases if _elements(c)]
        if not everything:
            cases = [max(cases, key=_elements)]
        for exact in (None, *(op.exact if backend == "cuda" else ())):
            # Triton has no bfloat16 on sm_75
            small = torch.float16 if (backend, arch) == ("triton", "sm_75") else torch.bfloat16
            for case in cases:
                for dtype in DTYPES if case.large else (small,):
                    yield from _planned(op, backend, arch, exact, dtype, case, 16)
                    if backend == "triton":
                        yield from _planned_backward(op, arch, dtype, case)
                    if everything and case.large and not exact and dtype != torch.float16:
                        yield from _planned(op, backend, arch, exact, dtype, case, dtype.itemsize)


def _planned(
    op: Op,
    backend: str,
    arch: str,
    exact: str | None,
    dtype: torch.dtype,
    case: Case,
    alignment: int,
) -> Iterator[Kernel]:
    arguments = _as_kernels_read(case, dtype)
    outputs = op.allocate(*(arguments[n] for n in op.arguments))
    values = arguments | dict(zip(op.outputs, outputs, strict=True))
    alignment = min(alignment, _alignment(values.values()))
    call = Call(values, op=op.name, exact=exact, target=TARGETS[arch], alignment=alignment)
    try:
        launch = getattr(op.kernels, backend)(call)
    except Unsupported:
        return
    how = f", exact {exact}" if exact else ""
    name = f"{op.name} [{case.name}] {dtype}{how}, {alignment}-byte"
    yield Kernel(name, launch, call, dtype, case.large)


def _planned_backward(op: Op, arch: str, dtype: torch.dtype, case: Case) -> Iterator[Kernel]:
    """The kernels of the gradients of all tensors."""
    if op.backward is None:
        return
    arguments = _as_kernels_read(case, dtype)
    outputs = op.allocate(*(arguments[n] for n in op.arguments))
    values = arguments | dict(zip(op.outputs, outputs, strict=True))
    grads = {n: torch.empty_like(values[n]) for n in op.outputs}
    wanted = [n for n, a in arguments.items() if isinstance(a, torch.Tensor)]
    outs = op.backward.allocate(grads, values, wanted)
    for number, step in enumerate(op.backward.triton(grads, values, outs), 1):
        call = Call(step.values, op=f"{op.name}_backward", exact=None, target=TARGETS[arch])
        name = f"{op.name} [{case.name}] {dtype}, backward {number}"
        yield Kernel(name, step.plan(call), call, dtype, case.large)


def _as_kernels_read(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    arguments = case.arguments(Inputs(dtype, "meta"))
    return dict(zip(arguments, with_dense_rows(arguments.values()), strict=True))


def _alignment(values: Iterable[Any]) -> int:
    """The alignment of tensors in memory that is aligned to 16 bytes."""
    found = [t for t in values if isinstance(t, torch.Tensor)]
    bits = functools.reduce(or_, (t.storage_offset() * t.element_size() for t in found), 16)
    return bits & -bits


def _elements(case: Case) -> int:
    """The elements of the largest tensor; 0 if a tensor is empty."""
    given = case.arguments(Inputs(torch.float32, "meta")).values()
    counts = [t.numel() for t in given if isinstance(t, torch.Tensor)]
    return max(counts) if all(counts) else 0


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel as ptxas reports them; stack and spills in bytes."""

    entry: str
    stack: int
    stores: int
    loads: int
    registers: int

    @property
    def spills(self) -> bool:
        """Whether registers are spilled. A stack without spills is an array that is indexed by a
        run-time value, or a few bytes that ptxas keeps for a call: worth a look, no failure."""
        return bool(self.stores or self.loads)

    @property
    def clean(self) -> bool:
        return not (self.stack or self.spills)


def usage(report: str) -> list[Usage]:
    """The kernels in a report of ptxas -v."""
    found = re.findall(
        r"Compiling entry function '(\w+)'(?:.*\n)+?"
        r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers",
        report,
    )
    return [Usage(entry, *map(int, numbers)) for entry, *numbers in found]
