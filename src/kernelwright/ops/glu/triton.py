"""The gated-unit kernel in Triton: a program takes a segment of one row, or several short rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from ..row.triton import locate, place
from ..rows import rows_of
from .call import GluCall

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def activate(b_a, ACT: tl.constexpr):
    if ACT == "silu":
        return b_a * tl.sigmoid(b_a)
    elif ACT == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) = x sigmoid(2u), without the cancellation
        return b_a * tl.sigmoid(1.5957691216057308 * (b_a + 0.044715 * b_a * b_a * b_a))
    else:
        return b_a * 0.5 * (1.0 + tl.erf(b_a * 0.7071067811865476))


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def glu_kernel(
    a,
    b,
    y,
    rows,
    n_middle,
    n_inner,
    a_outer,
    a_middle,
    b_outer,
    b_middle,
    y_outer,
    y_middle,
    a_inner: tl.constexpr,
    b_inner: tl.constexpr,
    y_inner: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ACT: tl.constexpr,
):
    SEGMENTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64)
    i_row = i // SEGMENTS * ROWS + tl.arange(0, ROWS)
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_n = (i % SEGMENTS * BLOCK + tl.arange(0, BLOCK))[None, :]
    m = (i_row < rows)[:, None] & (o_n < H)
    p_a = a + place(i_outer, i_middle, i_inner, a_outer, a_middle, a_inner, DIMS) + A + o_n
    p_b = b + place(i_outer, i_middle, i_inner, b_outer, b_middle, b_inner, DIMS) + B + o_n
    b_a = tl.load(p_a, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(p_b, mask=m, other=0.0).to(tl.float32)
    b_y = activate(b_a, ACT) * b_b
    p_y = y + place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS) + o_n
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m)


# elements of a program, halved down to 512 until they divide the width: models need no mask
SEGMENT = 2048


def tile_for(rows: int, width: int) -> tuple[int, int]:
    """Rows per program and elements of each: a segment of one row, or several short rows."""
    block = min(SEGMENT, triton.next_power_of_2(width))
    while block > 512 and width % block:
        block //= 2
    if width > block:
        return 1, block
    return max(1, min(SEGMENT // block, triton.next_power_of_2(rows))), block


def plan(glu: GluCall, call: Call) -> TritonLaunch:
    rows = rows_of(call["out"].shape, [call[n] for n in glu.pointers])
    sizes, strides = rows.padded()
    width = call["out"].shape[-1]
    a, b = glu.offsets
    tile, block = tile_for(rows.count, width)
    return TritonLaunch(
        kernel=glu_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(width, block),),
        pointers=glu.pointers,
        scalars=(rows.count, sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            "a_inner": strides[0][2],
            "b_inner": strides[1][2],
            "y_inner": strides[2][2],
            "H": width,
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
            "A": a,
            "B": b,
            "ACT": glu.function,
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
