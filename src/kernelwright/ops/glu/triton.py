"""The gated-unit kernel in Triton: a program takes a stretch of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from ..row.triton import locate, place
from ..rows import rows_of

if TYPE_CHECKING:
    from ..op import Call


@triton.jit
def activate(b_a, ACT: tl.constexpr):
    if ACT == "silu":
        return b_a * tl.sigmoid(b_a)
    elif ACT == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) is x sigmoid(2u), without the cancellation
        return b_a * tl.sigmoid(1.5957691216057308 * (b_a + 0.044715 * b_a * b_a * b_a))
    else:
        return b_a * 0.5 * (1.0 + tl.erf(b_a * 0.7071067811865476))


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def glu_kernel(
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
    FIRST: tl.constexpr,
    ACT: tl.constexpr,
):
    STRETCHES: tl.constexpr = (H + BLOCK - 1) // BLOCK
    i = tl.program_id(0).to(tl.int64)
    i_row = i // STRETCHES * ROWS + tl.arange(0, ROWS)
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_n = (i % STRETCHES * BLOCK + tl.arange(0, BLOCK))[None, :]
    m = (i_row < rows)[:, None] & (o_n < H)
    p_x = x + place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS) + o_n
    b_first = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + H, mask=m, other=0.0).to(tl.float32)
    b_y = activate(b_first, ACT) * b_second if FIRST else activate(b_second, ACT) * b_first
    p_y = y + place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS) + o_n
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m)


# a program's elements; widths of models are multiples of one of these, so nothing is masked
STRETCH = 2048


def plan(activation: str, first: bool, call: Call) -> TritonLaunch:
    x, out = call["input"], call["out"]
    rows = rows_of(out.shape, [x, out])
    sizes, strides = rows.padded()
    width = out.shape[-1]
    block = min(STRETCH, triton.next_power_of_2(width))
    while block > 512 and width % block:
        block //= 2
    tile = max(1, min(STRETCH // block, triton.next_power_of_2(rows.count)))
    if width > block:
        tile = 1
    return TritonLaunch(
        kernel=glu_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(width, block),),
        pointers=("input", "out"),
        scalars=(rows.count, sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            "x_inner": strides[0][2],
            "y_inner": strides[1][2],
            "H": width,
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
            "FIRST": first,
            "ACT": activation,
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
