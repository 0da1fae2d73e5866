"""fp8 quantisation of rows in Triton: a program reads its rows once.

As in the row kernel, a row is a head of the largest power of two and a tail with the rest. The
`left` part of a concatenated row is a block of its own, with the same scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch
from ..glu.triton import activate
from ..row.call import check_fp8
from ..row.triton import fp8_scales, head_and_tail, load, locate, place
from ..rows import rows_of

if TYPE_CHECKING:
    from ..plan import Call

WIDEST = 32768


@triton.jit
def largest(b):
    return tl.max(tl.abs(b), 1)


@triton.jit
def operand(x, up, o_x, o_up, o_n, m, ACT: tl.constexpr):
    """act(x) * up"""
    b = load(x, o_x, o_n, m)
    if ACT != "none":
        b = activate(b, ACT)
    if up is not None:
        b *= load(up, o_up, o_n, m)
    return b


@triton.jit
def write(p, b, b_in, o_n, m):
    tl.store(p + tl.max_contiguous(o_n, [1, 8]), (b * b_in[:, None]).to(p.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def quantize_kernel(
    x,
    up,
    left,
    y,
    scale,
    rows,
    n_middle,
    n_inner,
    x_outer,
    x_middle,
    up_outer,
    up_middle,
    left_outer,
    left_middle,
    y_outer,
    y_middle,
    x_inner: tl.constexpr,
    up_inner: tl.constexpr,
    left_inner: tl.constexpr,
    y_inner: tl.constexpr,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    LEFT: tl.constexpr,
    LEFT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    ACT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = (i_row < rows)[:, None]
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_x = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
    o_up = place(i_outer, i_middle, i_inner, up_outer, up_middle, up_inner, DIMS)
    o_left = place(i_outer, i_middle, i_inner, left_outer, left_middle, left_inner, DIMS)
    p_y = y + place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS)

    o_h = tl.arange(0, HEAD)[None, :]
    m_h = m_row & (o_h < N)
    b_h = operand(x, up, o_x, o_up, o_h, m_h, ACT)
    b_largest = largest(b_h)
    if TAIL > 0:
        o_t = HEAD + tl.arange(0, TAIL)[None, :]
        m_t = m_row & (o_t < N)
        b_t = operand(x, up, o_x, o_up, o_t, m_t, ACT)
        b_largest = tl.maximum(b_largest, largest(b_t))
    if left is not None:
        o_l = tl.arange(0, LEFT_BLOCK)[None, :]
        m_l = m_row & (o_l < LEFT)
        b_l = load(left, o_left, o_l, m_l)
        b_largest = tl.maximum(b_largest, largest(b_l))

    b_in, b_out = fp8_scales(b_largest)
    write(p_y + LEFT, b_h, b_in, o_h, m_h)
    if TAIL > 0:
        write(p_y + LEFT, b_t, b_in, o_t, m_t)
    if left is not None:
        write(p_y, b_l, b_in, o_l, m_l)
    tl.store(scale + i_row, b_out, mask=i_row < rows)


# Elements of a program with several rows, and of a thread. Tuned on H200, us for 4, 8 and 16 warps,
# with GELU: 39.8, 38.0, 42.2 at 5376x8192 and 55.4, 51.8, 75.6 at 4608x12288; concatenated rows of
# 3072 and 12288 72.7 for 8, 107 for 16. Without it 12.8 for 2, 13.1 for 4 at 4608x3072. With two
# operands 16 warps: 86.1 against 89.5 for SwiGLU at 4096x14336.
NARROW, PER_THREAD, MAX_WARPS = 2048, 32, 8
MOST = 64  # elements per thread: more would spill registers


def plan(call: Call) -> TritonLaunch:
    x, up, left, out = (call[n] for n in ("x", "up", "left", "out"))
    width, left_width = x.shape[-1], 0 if left is None else left.shape[-1]
    if out.shape[-1] > WIDEST:
        raise Unsupported(f"rows of {out.shape[-1]} elements, the kernel holds {WIDEST}")
    if not width or (left is not None and not left_width):
        raise Unsupported("a part of its rows is empty")
    check_fp8(call)
    rows = rows_of(out.shape, [x, up, left, out])
    sizes, strides = rows.padded()
    head, tail = head_and_tail(width)
    left_block = triton.next_power_of_2(left_width) if left_width else 0
    block = head + tail + left_block
    tile = 1
    while 2 * tile * block <= NARROW:
        tile *= 2
    most = MAX_WARPS if up is None else 2 * MAX_WARPS
    warps = max(1, min(most, tile * block // (32 * PER_THREAD)), block // (32 * MOST))
    return TritonLaunch(
        kernel=quantize_kernel,
        grid=(triton.cdiv(rows.count, tile),),
        pointers=("x", "up", "left", "out", "scale"),
        scalars=(rows.count, sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            "x_inner": strides[0][2],
            "up_inner": strides[1][2],
            "left_inner": strides[2][2],
            "y_inner": strides[3][2],
            "N": width,
            "HEAD": head,
            "TAIL": tail,
            "LEFT": left_width,
            "LEFT_BLOCK": left_block,
            "ROWS": tile,
            "DIMS": len(rows.sizes),
            "ACT": "gelu_erf" if call["activation"] == "gelu" else call["activation"],
        },
        num_warps=1 << (warps.bit_length() - 1),
        alignment=min(16, call.alignment),
    )
