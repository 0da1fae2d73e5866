"""The kernel of the gradients and its launch: a program takes a piece of a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernelwright.backends.triton import TritonLaunch
from kernelwright.ops.row.triton import load, locate, place
from kernelwright.ops.rows import rows_of

if TYPE_CHECKING:
    from kernelwright.ops.op import Call

# elements per program
STRETCH = 2048


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def squared_relu_backward_kernel(
    dy,
    x,
    dx,
    rows,
    n_middle,
    n_inner,
    dy_outer,
    dy_middle,
    x_outer,
    x_middle,
    dx_outer,
    dx_middle,
    dy_inner: tl.constexpr,
    x_inner: tl.constexpr,
    dx_inner: tl.constexpr,
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
    o_dy = place(i_outer, i_middle, i_inner, dy_outer, dy_middle, dy_inner, DIMS)
    o_x = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
    o_dx = place(i_outer, i_middle, i_inner, dx_outer, dx_middle, dx_inner, DIMS)
    b_dy = load(dy, o_dy, o_n, m)
    b_x = load(x, o_x, o_n, m)

    # dx = dy * 2 * max(x, 0)
    b_dx = b_dy * (2.0 * tl.where(b_x < 0.0, 0.0, b_x))
    tl.store(dx + o_dx + o_n, b_dx.to(dx.dtype.element_ty), mask=m)


def plan(call: Call) -> TritonLaunch:
    """The launch for one signature."""
    names = ("dy", "input", "dx")
    rows = rows_of(call["dx"].shape, [call[n] for n in names])
    sizes, (at_dy, at_x, at_dx) = rows.padded()
    width = call["dx"].shape[-1]
    block = min(STRETCH, triton.next_power_of_2(width))
    tile = min(STRETCH // block, triton.next_power_of_2(rows.count))
    return TritonLaunch(
        kernel=squared_relu_backward_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(width, block),),
        pointers=names,
        scalars=(
            rows.count,
            *sizes[1:],
            *at_dy[:2],
            *at_x[:2],
            *at_dx[:2],
        ),
        constants={
            "dy_inner": at_dy[2],
            "x_inner": at_x[2],
            "dx_inner": at_dx[2],
            "N": width,
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
