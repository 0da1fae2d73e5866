"""Sums over rows, always in one order: the second stage of gradients that rows share.

A backward kernel leaves the sums of its programs; this kernel adds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..backends.triton import TritonLaunch
from .backward import Step

if TYPE_CHECKING:
    from .plan import Call


@triton.jit(do_not_specialize=["terms"])
def row_sums_kernel(
    partials, out, terms, N: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr
):
    """out [groups, N] = the sum of partials [groups, terms, N] over terms, always in one order."""
    SEGMENTS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    i = tl.program_id(0).to(tl.int64)
    i_group = i // SEGMENTS
    o_n = (i % SEGMENTS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    b = tl.zeros([TERMS, COLUMNS], tl.float32)
    for i_term in range(0, terms, TERMS):
        o_term = (i_term + tl.arange(0, TERMS))[:, None]
        m = (o_term < terms) & (o_n < N)
        b += tl.load(partials + (i_group * terms + o_term) * N + o_n, mask=m, other=0.0)
    b_sum = tl.sum(b, 0)[None, :]
    tl.store(out + i_group * N + o_n, b_sum.to(out.dtype.element_ty), mask=o_n < N)


# chosen by reasoning, not yet tuned
COLUMNS, TERMS = 64, 32


def plan(call: Call) -> TritonLaunch:
    groups, terms, width = call["partials"].shape
    return TritonLaunch(
        kernel=row_sums_kernel,
        grid=(groups * triton.cdiv(width, COLUMNS),),
        pointers=("partials", "out"),
        scalars=(terms,),
        constants={"N": width, "COLUMNS": COLUMNS, "TERMS": TERMS},
        num_warps=4,
        alignment=min(16, call.alignment),
    )


def sums_of(partials: Tensor, out: Tensor) -> Step:
    """out [groups..., N] = partials [groups, terms, N] summed over terms."""
    return Step(plan, {"partials": partials, "out": out})
