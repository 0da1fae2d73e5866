"""The rotary kernel in Triton.

It works on pairs: a row of N elements is N/2 pairs, a head of the largest power of two and a tail.
Interleaved pairs are loaded as they lie and split in registers; half-row pairs are two loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from ..row.triton import NARROW, locate, place
from .call import EMPTY, RopeCall

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def columns(START: tl.constexpr, U: tl.constexpr, D: tl.constexpr, LAYOUT: tl.constexpr):
    """Where pairs START.. lie in a row: [1, 2U] interleaved, else their first elements [1, U]."""
    if LAYOUT == "interleaved":
        return 2 * START + tl.arange(0, 2 * U)[None, :]
    else:
        o_u = START + tl.arange(0, U)[None, :]
        return o_u // (D // 2) * D + o_u % (D // 2)


@triton.jit
def load_pairs(
    p,
    o_row,
    o_n,
    m,
    ROWS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Both elements of each pair, float32 [ROWS, U]."""
    if LAYOUT == "interleaved":
        b = tl.load(p + o_row + o_n, mask=m, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(b, (ROWS, U, 2)))
    else:
        b_a = tl.load(p + o_row + o_n, mask=m, other=0.0).to(tl.float32)
        b_b = tl.load(p + o_row + o_n + D // 2, mask=m, other=0.0).to(tl.float32)
        return b_a, b_b


@triton.jit
def load_table(
    p,
    o_row,
    o_n,
    m,
    m_u,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    U: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALF_TABLE: tl.constexpr,
):
    """The table's columns for both elements of each pair; the rotation repeats every D."""
    if HALF_TABLE:
        o_u = (START + tl.arange(0, U)[None, :]) % (D // 2)
        b = tl.load(p + o_row + o_u, mask=m_u, other=0.0).to(tl.float32)
        return b, b
    else:
        return load_pairs(p, o_row, o_n % D, m, ROWS, U, D, LAYOUT)


@triton.jit
def turn(
    b_a,
    b_b,
    b_rstd,
    weight,
    cos,
    sin,
    y,
    o_cos,
    o_sin,
    o_y,
    m_row,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    U: tl.constexpr,
    PAIRS: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALF_TABLE: tl.constexpr,
):
    """Normalise, multiply by the weight, rotate and store one segment of the rows."""
    o_n = columns(START, U, D, LAYOUT)
    m_u = (START + tl.arange(0, U)[None, :]) < PAIRS
    m_n = (o_n < 2 * PAIRS) if LAYOUT == "interleaved" else m_u
    b_a *= b_rstd
    b_b *= b_rstd
    if weight is not None:
        # the weight is one row [1, .], which broadcasts over the tile
        b_wa, b_wb = load_pairs(weight, 0, o_n, m_n, 1, U, D, LAYOUT)
        b_a *= b_wa
        b_b *= b_wb
    if cos is not None:
        m = m_row & m_n
        b_ca, b_cb = load_table(
            cos, o_cos, o_n, m, m_row & m_u, START, ROWS, U, D, LAYOUT, HALF_TABLE
        )
        b_sa, b_sb = load_table(
            sin, o_sin, o_n, m, m_row & m_u, START, ROWS, U, D, LAYOUT, HALF_TABLE
        )
        b_left = b_a * b_ca - b_b * b_sa
        b_right = b_b * b_cb + b_a * b_sb
        b_a = b_left
        b_b = b_right
    p_y = y + o_y + o_n
    if LAYOUT == "interleaved":
        b_y = tl.reshape(tl.join(b_a, b_b), (ROWS, 2 * U))
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_row & m_n)
    else:
        tl.store(p_y, b_a.to(y.dtype.element_ty), mask=m_row & m_n)
        tl.store(p_y + D // 2, b_b.to(y.dtype.element_ty), mask=m_row & m_n)


@triton.jit
def norm_and_turn(
    i_block,
    x,
    weight,
    cos,
    sin,
    y,
    rows,
    n_middle,
    n_inner,
    x_outer,
    x_middle,
    x_inner: tl.constexpr,
    cos_outer,
    cos_middle,
    cos_inner: tl.constexpr,
    sin_outer,
    sin_middle,
    sin_inner: tl.constexpr,
    y_outer,
    y_middle,
    y_inner: tl.constexpr,
    eps,
    PAIRS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALF_TABLE: tl.constexpr,
    NORM: tl.constexpr,
):
    i_row = i_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = (i_row < rows)[:, None]
    i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
    o_x = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
    o_cos = place(i_outer, i_middle, i_inner, cos_outer, cos_middle, cos_inner, DIMS)
    o_sin = place(i_outer, i_middle, i_inner, sin_outer, sin_middle, sin_inner, DIMS)
    o_y = place(i_outer, i_middle, i_inner, y_outer, y_middle, y_inner, DIMS)

    o_h = columns(0, HEAD, D, LAYOUT)
    m_h = (o_h < 2 * PAIRS) if LAYOUT == "interleaved" else (tl.arange(0, HEAD)[None, :] < PAIRS)
    b_ha, b_hb = load_pairs(x, o_x, o_h, m_row & m_h, ROWS, HEAD, D, LAYOUT)
    if TAIL > 0:
        o_t = columns(HEAD, TAIL, D, LAYOUT)
        m_t = (
            (o_t < 2 * PAIRS)
            if LAYOUT == "interleaved"
            else (HEAD + tl.arange(0, TAIL)[None, :] < PAIRS)
        )
        b_ta, b_tb = load_pairs(x, o_x, o_t, m_row & m_t, ROWS, TAIL, D, LAYOUT)
    b_rstd = 1.0
    if NORM:
        b_square = tl.sum(b_ha * b_ha + b_hb * b_hb, 1)
        if TAIL > 0:
            b_square += tl.sum(b_ta * b_ta + b_tb * b_tb, 1)
        b_rstd = (tl.rsqrt(b_square / (2 * PAIRS) + eps))[:, None]
    turn(
        b_ha, b_hb, b_rstd, weight, cos, sin, y, o_cos, o_sin, o_y, m_row,
        0, ROWS, HEAD, PAIRS, D, LAYOUT, HALF_TABLE,
    )  # fmt: skip
    if TAIL > 0:
        turn(
            b_ta, b_tb, b_rstd, weight, cos, sin, y, o_cos, o_sin, o_y, m_row,
            HEAD, ROWS, TAIL, PAIRS, D, LAYOUT, HALF_TABLE,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["q_rows", "q_n1", "q_n2", "k_rows", "k_n1", "k_n2", "q_blocks"],
)
def rope_kernel(
    query,
    key,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    q_rows,
    q_n1,
    q_n2,
    k_rows,
    k_n1,
    k_n2,
    q_blocks,
    q0,
    q1,
    qc0,
    qc1,
    qs0,
    qs1,
    qo0,
    qo1,
    k0,
    k1,
    kc0,
    kc1,
    ks0,
    ks1,
    ko0,
    ko1,
    eps,
    q2: tl.constexpr,
    qc2: tl.constexpr,
    qs2: tl.constexpr,
    qo2: tl.constexpr,
    k2: tl.constexpr,
    kc2: tl.constexpr,
    ks2: tl.constexpr,
    ko2: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALF_TABLE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Strides count from the outermost row dimension: q query, k key, c cos, s sin, o out."""
    i = tl.program_id(0)
    if i < q_blocks:
        norm_and_turn(
            i, query, q_weight, cos, sin, q_out, q_rows, q_n1, q_n2,
            q0, q1, q2, qc0, qc1, qc2, qs0, qs1, qs2, qo0, qo1, qo2, eps,
            PAIRS, HEAD, TAIL, ROWS, DIMS, D, LAYOUT, HALF_TABLE, NORM,
        )  # fmt: skip
    elif key is not None:
        norm_and_turn(
            i - q_blocks, key, k_weight, cos, sin, k_out, k_rows, k_n1, k_n2,
            k0, k1, k2, kc0, kc1, kc2, ks0, ks1, ks2, ko0, ko1, ko2, eps,
            PAIRS, HEAD, TAIL, ROWS, DIMS, D, LAYOUT, HALF_TABLE, NORM,
        )  # fmt: skip


def plan(rope: RopeCall, call: Call) -> TritonLaunch:
    q_rows, k_rows = rope.rows("query"), rope.rows("key") or EMPTY
    assert q_rows is not None
    (q_sizes, q_strides), (k_sizes, k_strides) = q_rows.padded(), k_rows.padded()
    pairs = rope.width // 2
    head = 1 << (pairs.bit_length() - 1)
    tail = triton.next_power_of_2(pairs - head) if pairs > head else 0
    if head < 32 and tail:
        head, tail = 2 * head, 0
    tile = 1
    while tile * head * 4 <= NARROW and head <= 256:
        tile *= 2
    # tuned on H200 at 4608x24x128 and 2x2688x2048: with a norm, fewer and fuller warps are faster
    warps = max(1, min(8, (head + tail) * 2 * tile // (512 if rope.norm else 256)))
    places = (*q_strides, *k_strides)
    inner = dict(
        zip(
            ("q2", "qc2", "qs2", "qo2", "k2", "kc2", "ks2", "ko2"),
            (p[2] for p in places),
            strict=True,
        )
    )
    q_blocks = triton.cdiv(q_rows.count, tile)
    return TritonLaunch(
        kernel=rope_kernel,
        grid=(q_blocks + triton.cdiv(k_rows.count, tile),),
        pointers=rope.pointers,
        scalars=(
            q_rows.count,
            *q_sizes[1:],
            k_rows.count,
            *k_sizes[1:],
            q_blocks,
            *(s for p in places for s in p[:2]),
            rope.eps,
        ),
        constants={
            **inner,
            "PAIRS": pairs,
            "HEAD": head,
            "TAIL": tail,
            "ROWS": tile,
            "DIMS": max(len(q_rows.sizes), len(k_rows.sizes)),
            "D": rope.rotation,
            "LAYOUT": rope.layout,
            "HALF_TABLE": rope.half_table,
            "NORM": rope.norm,
        },
        num_warps=1 << (warps.bit_length() - 1),
        alignment=min(16, call.alignment),
    )
