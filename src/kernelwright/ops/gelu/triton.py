"""GELU in Triton: a program takes a segment of one row, or several short rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from ..glu.triton import activate, tile_for
from ..row.triton import locate, place
from ..rows import rows_of

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def gelu_kernel(
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
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    ACT: tl.constexpr,
):
    SEGMENTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64)
    i_row = i // SEGMENTS * ROWS + tl.arange(0, ROWS)
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_n = (i % SEGMENTS * BLOCK + tl.arange(0, BLOCK))[None, :]
    m = (i_row < rows)[:, None] & (o_n < H)
    p_x = x + place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS) + o_n
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    p_y = y + place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS) + o_n
    tl.store(p_y, activate(b_x, ACT).to(y.dtype.element_ty), mask=m)


def plan(call: Call) -> TritonLaunch:
    pointers = "input", "out"
    rows = rows_of(call["out"].shape, [call[n] for n in pointers])
    sizes, strides = rows.padded()
    width = call["out"].shape[-1]
    tile, block = tile_for(rows.count, width)
    return TritonLaunch(
        kernel=gelu_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(width, block),),
        pointers=pointers,
        scalars=(rows.count, sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            "x_inner": strides[0][2],
            "y_inner": strides[1][2],
            "H": width,
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
            "ACT": "gelu_tanh" if call["approximate"] else "gelu_erf",
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
