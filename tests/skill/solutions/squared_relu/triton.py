"""The Triton kernel and its launch: a program takes a piece of a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernelwright.backends.triton import TritonLaunch
from kernelwright.ops.row.triton import locate, place
from kernelwright.ops.rows import rows_of

if TYPE_CHECKING:
    from kernelwright.ops.op import Call

# elements per program
STRETCH = 2048


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def squared_relu_kernel(
    x,
    y,
    rows,
    n_middle,
    n_inner,
    x_outer,
    x_middle,
    y_outer,
    y_middle,
    x_inner: tl.constexpr,
    y_inner: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
):
    STRETCHES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64)
    i_row = i // STRETCHES * ROWS + tl.arange(0, ROWS)
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_n = (i % STRETCHES * BLOCK + tl.arange(0, BLOCK))[None, :]
    m = (i_row < rows)[:, None] & (o_n < N)
    p_x = x + place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS) + o_n
    p_y = y + place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS) + o_n

    # y = max(x, 0)^2; tl.maximum would drop a NaN
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_r = tl.where(b_x < 0.0, 0.0, b_x)
    b_y = b_r * b_r
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m)


def plan(call: Call) -> TritonLaunch:
    """The launch for one signature."""
    out = call["out"]
    rows = rows_of(out.shape, [call["input"], out])
    sizes, (at_x, at_y) = rows.padded()
    width = out.shape[-1]
    block = min(STRETCH, triton.next_power_of_2(width))
    tile = min(STRETCH // block, triton.next_power_of_2(rows.count))
    return TritonLaunch(
        kernel=squared_relu_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(width, block),),
        pointers=("input", "out"),
        scalars=(rows.count, *sizes[1:], *at_x[:2], *at_y[:2]),
        constants={
            "x_inner": at_x[2],
            "y_inner": at_y[2],
            "N": width,
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
