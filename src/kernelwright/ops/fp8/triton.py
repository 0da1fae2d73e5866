"""Rows in eight bits: a program takes a row, which it reads once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch
from ..glu.triton import activate
from ..row.triton import load, locate, place
from ..rows import rows_of

if TYPE_CHECKING:
    from ..op import Call

WIDEST = 32768  # 64 elements a thread: more would spill


@triton.jit(do_not_specialize=["n_middle", "n_inner"])
def quantize_kernel(
    x,
    up,
    y,
    scale,
    n_middle,
    n_inner,
    x_outer,
    x_middle,
    up_outer,
    up_middle,
    y_outer,
    y_middle,
    x_inner: tl.constexpr,
    up_inner: tl.constexpr,
    y_inner: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    ACT: tl.constexpr,
    LARGEST: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_x = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
    o_y = place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS)
    o_n = tl.arange(0, BLOCK)[None, :]
    m_n = o_n < N

    b_y = load(x, o_x, o_n, m_n)
    if ACT != "none":
        b_y = activate(b_y, ACT)
    if up is not None:
        o_up = place(i_outer, i_middle, i_inner, up_outer, up_middle, up_inner, DIMS)
        b_y *= load(up, o_up, o_n, m_n)

    b_largest = tl.max(tl.abs(b_y), 1)
    b_largest = tl.where(b_largest == 0.0, LARGEST, b_largest)
    b_y *= (tl.div_rn(1.0 + 0.0 * b_largest, b_largest) * LARGEST)[:, None]
    tl.store(y + o_y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)
    tl.store(scale + i_row, b_largest * (1.0 / LARGEST))


def plan(call: Call) -> TritonLaunch:
    width = call["x"].shape[-1]
    if width > WIDEST:
        raise Unsupported(f"rows of {width} elements, the kernel holds {WIDEST}")
    if call.target.capability < (8, 9):
        raise Unsupported("eight-bit floats need compute capability 8.9")
    up = call["up"]
    tensors = [call["x"], call["x"] if up is None else up, call["out"]]
    rows = rows_of(call["out"].shape, tensors)
    sizes, strides = rows.padded()
    block = triton.next_power_of_2(width)
    return TritonLaunch(
        kernel=quantize_kernel,
        grid=(rows.count,),
        pointers=("x", "up", "out", "scale"),
        scalars=(sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            "x_inner": strides[0][2],
            "up_inner": strides[1][2],
            "y_inner": strides[2][2],
            "N": width,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
            "ACT": "gelu_erf" if call["activation"] == "gelu" else call["activation"],
            "LARGEST": 448.0,
        },
        num_warps=max(1, min(16, block // 512)),
        alignment=min(16, call.alignment),
    )
