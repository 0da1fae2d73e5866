"""The row kernel in Triton.

A row of N elements is a head of the largest power of two and a tail with the rest, so widths such
as 3072, 5120 or 1152 waste no lanes. Several narrow rows share a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from .call import RowCall

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def locate(i_row, n_middle, n_inner, DIMS: tl.constexpr):
    """Row numbers on up to three dimensions: (outer, middle, inner)."""
    i_inner = i_row
    i_middle = i_row
    i_outer = i_row
    if DIMS > 1:
        i_middle = i_row // n_inner
        i_inner = i_row % n_inner
    if DIMS > 2:
        i_outer = i_middle // n_middle
        i_middle = i_middle % n_middle
    return i_outer, i_middle, i_inner


@triton.jit
def place(i_outer, i_middle, i_inner, outer, middle, inner, DIMS: tl.constexpr):
    """Offsets of rows [ROWS, 1], in elements."""
    o = i_inner * inner
    if DIMS > 1:
        o += i_middle * middle
    if DIMS > 2:
        o += i_outer * outer
    return o[:, None]


@triton.jit
def load(p, o_row, o_n, m):
    return tl.load(p + o_row + o_n, mask=m, other=0.0).to(tl.float32)


@triton.jit
def arrive(x, residual, gate, sum, o_x, o_residual, o_gate, o_sum, o_n, m):
    """s = residual + gate * x, rounded and stored; x itself if there is no residual."""
    b_x = load(x, o_x, o_n, m)
    if residual is not None:
        if gate is not None:
            b_x *= load(gate, o_gate, o_n, m)
        b_s = (load(residual, o_residual, o_n, m) + b_x).to(x.dtype.element_ty)
        tl.store(sum + o_sum + o_n, b_s, mask=m)
        b_x = b_s.to(tl.float32)
    return b_x


@triton.jit
def operand(p, o_row, o_n, m, ABSENT: tl.constexpr):
    """A block of the operand; ABSENT, the neutral element, if there is none."""
    if p is not None:
        return load(p, o_row, o_n, m)
    else:
        return ABSENT


LARGEST = tl.constexpr(448.0)  # the largest fp8 (e4m3) value


@triton.jit
def fp8_scales(b_largest):
    """Quantisation scales of rows and their inverses, given the largest element of each row."""
    b_largest = tl.where(b_largest == 0.0, LARGEST, b_largest)
    return tl.div_rn(1.0 + 0.0 * b_largest, b_largest) * LARGEST, b_largest * (1.0 / LARGEST)


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner", "wanted"])
def row_kernel(
    x,
    residual,
    gate,
    weight,
    bias,
    scale,
    shift,
    out_gate,
    y,
    sum,
    eight,
    eight_scale,
    rows,
    n_middle,
    n_inner,
    x_outer,
    x_middle,
    residual_outer,
    residual_middle,
    gate_outer,
    gate_middle,
    scale_outer,
    scale_middle,
    shift_outer,
    shift_middle,
    out_gate_outer,
    out_gate_middle,
    y_outer,
    y_middle,
    sum_outer,
    sum_middle,
    eps,
    wanted,
    x_inner: tl.constexpr,
    residual_inner: tl.constexpr,
    gate_inner: tl.constexpr,
    scale_inner: tl.constexpr,
    shift_inner: tl.constexpr,
    out_gate_inner: tl.constexpr,
    y_inner: tl.constexpr,
    sum_inner: tl.constexpr,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    NORM: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = (i_row < rows)[:, None]
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)

    o_x = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
    o_r = place(i_outer, i_middle, i_inner, residual_outer, residual_middle, residual_inner, DIMS)
    o_g = place(i_outer, i_middle, i_inner, gate_outer, gate_middle, gate_inner, DIMS)
    o_scale = place(i_outer, i_middle, i_inner, scale_outer, scale_middle, scale_inner, DIMS)
    o_shift = place(i_outer, i_middle, i_inner, shift_outer, shift_middle, shift_inner, DIMS)
    o_og = place(i_outer, i_middle, i_inner, out_gate_outer, out_gate_middle, out_gate_inner, DIMS)
    o_y = place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS)
    o_sum = place(i_outer, i_middle, i_inner, sum_outer, sum_middle, sum_inner, DIMS)

    o_h = tl.arange(0, HEAD)[None, :]
    m_h = o_h < N
    b_h = arrive(x, residual, gate, sum, o_x, o_r, o_g, o_sum, o_h, m_row & m_h)
    if TAIL > 0:
        o_t = HEAD + tl.arange(0, TAIL)[None, :]
        m_t = o_t < N
        b_t = arrive(x, residual, gate, sum, o_x, o_r, o_g, o_sum, o_t, m_row & m_t)

    if y is not None:
        # load the other operands first, so that they arrive during the reduction
        m_h2 = m_row & m_h
        b_wh = operand(weight, 0, o_h, m_h, 1.0)
        b_bh = operand(bias, 0, o_h, m_h, 0.0)
        b_ch = operand(scale, o_scale, o_h, m_h2, 0.0)
        b_sh = operand(shift, o_shift, o_h, m_h2, 0.0)
        b_gh = operand(out_gate, o_og, o_h, m_h2, 1.0)
        if TAIL > 0:
            m_t2 = m_row & m_t
            b_wt = operand(weight, 0, o_t, m_t, 1.0)
            b_bt = operand(bias, 0, o_t, m_t, 0.0)
            b_ct = operand(scale, o_scale, o_t, m_t2, 0.0)
            b_st = operand(shift, o_shift, o_t, m_t2, 0.0)
            b_gt = operand(out_gate, o_og, o_t, m_t2, 1.0)
        if NORM == "layer":
            b_sum = tl.sum(b_h, 1)
            if TAIL > 0:
                b_sum += tl.sum(b_t, 1)
            b_mean = (b_sum / N)[:, None]
            b_h = tl.where(m_h, b_h - b_mean, 0.0)
            if TAIL > 0:
                b_t = tl.where(m_t, b_t - b_mean, 0.0)
            # the deviations sum to the rounding error of the mean: subtract it
            b_left = tl.sum(b_h, 1)
            if TAIL > 0:
                b_left += tl.sum(b_t, 1)
            b_error = (b_left / N)[:, None]
            b_h = tl.where(m_h, b_h - b_error, 0.0)
            if TAIL > 0:
                b_t = tl.where(m_t, b_t - b_error, 0.0)
        if NORM != "none":
            b_square = tl.sum(b_h * b_h, 1)
            if TAIL > 0:
                b_square += tl.sum(b_t * b_t, 1)
            b_rstd = (tl.rsqrt(b_square / N + eps))[:, None]
            b_h *= b_rstd
            if TAIL > 0:
                b_t *= b_rstd
        b_h = (((b_h * b_wh + b_bh) * (1.0 + b_ch) + b_sh) * b_gh).to(y.dtype.element_ty)
        tl.store(y + o_y + o_h, b_h, mask=m_h2)
        if TAIL > 0:
            b_t = (((b_t * b_wt + b_bt) * (1.0 + b_ct) + b_st) * b_gt).to(y.dtype.element_ty)
            tl.store(y + o_y + o_t, b_t, mask=m_t2)

    if eight is not None:  # noqa: SIM102
        # a run-time condition: the same code with and without fp8, so the rows have the same bits
        if wanted != 0:
            b_qh = b_h.to(tl.float32)
            b_largest = tl.max(tl.abs(b_qh), 1)
            if TAIL > 0:
                b_qt = b_t.to(tl.float32)
                b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_qt), 1))
            b_in, b_out = fp8_scales(b_largest)
            p_e = eight + (i_row * N)[:, None]
            b_qh = (b_qh * b_in[:, None]).to(eight.dtype.element_ty)
            tl.store(p_e + tl.max_contiguous(o_h, [1, 8]), b_qh, mask=m_row & m_h)
            if TAIL > 0:
                b_qt = (b_qt * b_in[:, None]).to(eight.dtype.element_ty)
                tl.store(p_e + tl.max_contiguous(o_t, [1, 8]), b_qt, mask=m_row & m_t)
            tl.store(eight_scale + i_row, b_out, mask=i_row < rows)


# 2, 4 and 8 warps were tried on H200 at 4608x24x128, 2x2688x2048, 4608x3072 and 4096x4096: 16 to 24
# elements per thread are fastest or tie. NARROW, the elements of a program with several rows, is
# not tuned further.
NARROW, PER_THREAD, MAX_WARPS = 2048, 16, 16


def head_and_tail(width: int) -> tuple[int, int]:
    """The blocks that hold a row: powers of two, the second may be 0."""
    head = 1 << (width.bit_length() - 1)
    tail = triton.next_power_of_2(width - head) if width > head else 0
    # one masked block is faster than two tiny ones
    return (2 * head, 0) if head < 64 and tail else (head, tail)


def plan(row: RowCall, call: Call) -> TritonLaunch:
    rows = row.rows()
    sizes, strides = rows.padded()
    width = row.width
    head, tail = head_and_tail(width)
    tile = 1
    while tile * head * 2 <= NARROW and head <= 512:
        tile *= 2
    # without a norm threads share nothing, and more of them are faster: 12.9 against 13.3 us for
    # modulate at 2x2688x2048 on H200
    each = PER_THREAD if row.norm != "none" else PER_THREAD // 2
    if row.norm != "none" and row.eight[0]:
        each = 32  # 31.5 against 33.1 us at 2x4096x1536, a tie at 2048, 3072 and 4096
    warps = min(MAX_WARPS, max(1, (head + tail) * tile // (32 * each)))
    if row.norm == "layer" and tail and call.target.capability[0] >= 10:
        warps *= 2  # 24 elements per thread and a modulation spill registers there
    outer_middle = [s for place in strides for s in place[:2]]
    inner = dict(
        zip(
            ("x", "residual", "gate", "scale", "shift", "out_gate", "y", "sum"),
            (place[2] for place in strides),
            strict=True,
        )
    )
    return TritonLaunch(
        kernel=row_kernel,
        grid=(triton.cdiv(rows.count, tile),),
        pointers=(*row.pointers, *row.eight),
        scalars=(rows.count, sizes[1], sizes[2], *outer_middle, row.eps, int(row.wanted)),
        constants={
            **{f"{name}_inner": stride for name, stride in inner.items()},
            "N": width,
            "HEAD": head,
            "TAIL": tail,
            "ROWS": tile,
            "DIMS": len(rows.sizes),
            "NORM": row.norm,
        },
        num_warps=1 << (warps.bit_length() - 1),
        alignment=min(16, call.alignment),
    )
