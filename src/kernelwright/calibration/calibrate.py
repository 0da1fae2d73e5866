"""Compares every subject of `ops.ways` with the installed PyTorch, and finds the way it has.

On a GPU kernels are compared. Elsewhere exact modes run PyTorch's own ops, and what is compared
are the programs' interpreter and the trees of the orders: it shows how PyTorch's CPU kernels sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import HOPPER, Unsupported
from ..ops import ways
from ..ops.case import Inputs
from ..ops.op import Op, registry
from ..ops.plan import Call
from . import finder, functions, gradients, sums

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROBED = ("at::mean", "F.rms_norm")  # Welford's update of F.layer_norm has no tree of additions
PROBE_WIDTHS = (128, 2048)


@dataclass(frozen=True)
class Finding:
    """What was found of one subject: the way that has its bits, or None; the elements compared, and
    of them those that differ, by the way that differs least; the ways whose order of summation the
    installed op has, or None if that was not asked; the error that PyTorch's own op raises."""

    subject: str
    way: str | None
    compared: int
    differing: int
    orders: tuple[str, ...] | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.subject} fails here in PyTorch itself: {self.error}"
        if self.way is not None:
            return f"{self.subject} has the bits of {self.way}"
        if self.compared == 0:
            return f"{self.subject} was not compared"
        share = f"{self.differing:,} of {self.compared:,} elements differ"
        if self.orders is None:
            return f"{self.subject}: {share}"
        if self.orders:
            return f"{self.subject}: {share}, in the order of {' or '.join(self.orders)}"
        return f"{self.subject}: {share}, and it sums in no order that is known here"


def calibrate(device: str | None = None) -> list[Finding]:
    """Compare all subjects on the current GPU, or without one on the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        found = [_sum(subject, device) for subject in sums.SUMS]
        found += [_gradient(subject, device) for subject in gradients.GRADIENTS]
        return [*found, *_functions(device)]


def verdicts(findings: list[Finding]) -> ways.Found:
    """What `ways` keeps of them: a subject that was not compared is left to its guess."""
    return {f.subject: f.way for f in findings if f.compared or f.error}


def _sum(subject: str, device: str) -> Finding:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows, width, dtype in sums.sizes(device):
            for args in sums.arguments(subject, rows, width, dtype, device):
                try:
                    got = sums.computed(subject, args)
                except Unsupported:  # no kernel of this size: eager runs itself
                    continue
                yield sums.expected(subject, args), got

    if error := _error(subject, device):
        return Finding(subject, None, 0, 0, error=error)
    orders = None
    if subject in PROBED:
        seen = [finder.matching_ways(subject, w, torch.bfloat16, device) for w in PROBE_WIDTHS]
        orders = tuple(w for w in ways.SUBJECTS[subject] if all(w in s for s in seen))
    if device != "cuda" and subject not in PROBED:
        return Finding(subject, None, 0, 0)
    return _best(subject, pairs, orders)


def _gradient(subject: str, device: str) -> Finding:
    """Elsewhere than on a GPU programs run PyTorch's own gradients."""
    if device != "cuda" or gradients.GRADIENTS[subject][1] is None:
        return Finding(subject, None, 0, 0)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows, width, dtype in sums.sizes(device):
            for given in gradients.operands(subject, rows, width, dtype, device):
                try:
                    got = gradients.computed(subject, given)
                except Unsupported:
                    continue
                yield gradients.expected(subject, given), got

    return _best(subject, pairs)


def _error(subject: str, device: str) -> str | None:
    """What PyTorch's own op raises, as it does from torch 2.13 on where a package that it takes
    kernels from is installed in part."""
    args = next(sums.arguments(subject, *sums.sizes(device)[0], device))
    try:
        sums.expected(subject, args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _functions(device: str) -> list[Finding]:
    one = tuple(s for s in functions.FUNCTIONS if len(ways.SUBJECTS[s]) == 1)
    found = []
    counts = dict.fromkeys(one, (0, 0))
    for dtype in DTYPES:
        x = functions.numbers(dtype, device)
        results = functions.computed(one, x)  # one kernel a dtype
        for subject in one:
            compared, differing = counts[subject]
            differs = _differing(functions.expected(subject, x), results[subject])
            counts[subject] = compared + x.numel(), differing + differs
    for subject, (compared, differing) in counts.items():
        way = None if differing else ways.SUBJECTS[subject][0]
        found.append(Finding(subject, way, compared, differing))

    def pairs(subject: str) -> Iterator[tuple[Tensor, Tensor]]:
        for dtype in DTYPES:
            x = functions.numbers(dtype, device)
            yield functions.expected(subject, x), functions.computed((subject,), x)[subject]

    several = [s for s in functions.FUNCTIONS if s not in counts]
    return [*found, *(_best(s, lambda s=s: pairs(s)) for s in several)]  # type: ignore[misc]


def _best(
    subject: str,
    pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]],
    orders: tuple[str, ...] | None = None,
) -> Finding:
    """The first way by which nothing differs: one whose order the op has, then the guess."""
    tried = []
    for way in dict.fromkeys((*(orders or ()), ways.guess(subject), *ways.SUBJECTS[subject])):
        compared = differing = 0
        with ways.assuming(subject, way):
            for want, got in pairs():
                compared += want.numel()
                differing += _differing(want, got)
        if compared and not differing:
            return Finding(subject, way, compared, 0, orders)
        tried.append((differing, compared))
    differing, compared = min(tried)
    return Finding(subject, None, compared, differing, orders)


def _differing(want: Tensor, got: Tensor) -> int:
    """How many elements differ; NaN is equal to NaN."""
    return int(((want != got) & ~(want.isnan() & got.isnan())).sum())


def dependents() -> dict[str, list[str]]:
    """By subject, the exact modes whose kernels repeat it: "rmsnorm (torch)", ..."""
    found: dict[str, list[str]] = {subject: [] for subject in ways.SUBJECTS}
    for op in registry().values():
        if not isinstance(op, Op) or "cuda" not in op.backends:
            continue
        for chain in op.exact:
            for subject in sorted(_asked(op, chain)):
                found[subject].append(f"{op.name} ({chain})")
    return found


def _asked(op: Op, chain: str) -> set[str]:
    with ways.asked() as seen:
        for case in op.cases:
            given: dict[str, Any] = case.arguments(Inputs(torch.bfloat16, "meta"))
            outs = op.allocate(*(given[n] for n in op.arguments))
            if not any(o.numel() for o in outs):
                continue
            values = {**given, **dict(zip(op.outputs, outs, strict=True))}
            try:
                op.kernels.cuda(Call(values, op=op.name, exact=chain, target=HOPPER))
            except Unsupported:
                continue
    return seen
