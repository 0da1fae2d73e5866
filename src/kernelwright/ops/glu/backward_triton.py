"""The backward of gated linear units and of GELU in Triton, in the tiles of their forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends.triton import TritonLaunch
from ..row.triton import load, locate, place
from ..rows import rows_of
from .triton import activate, tile_for

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def slope(b_a, ACT: tl.constexpr):
    """act'(a)"""
    if ACT == "silu":
        b_s = tl.sigmoid(b_a)
        return b_s * (1.0 + b_a * (1.0 - b_s))
    elif ACT == "gelu_tanh":
        # act is a sigmoid(2u), 2u = 1.5958 (a + 0.0447 a^3); beyond 16 the sigmoid is flat, and
        # the square of a large a would be infinite
        b_c = tl.minimum(tl.maximum(b_a, -16.0), 16.0)
        b_square = b_c * b_c
        b_u = 1.5957691216057308 * (b_c + 0.044715 * b_square * b_c)
        b_s = tl.sigmoid(b_u)
        b_rise = 1.5957691216057308 * (1.0 + 0.134145 * b_square)
        # 1 - sigmoid(2u) without its cancellation, which shows in float32
        b_slope = b_s + b_c * b_s * tl.sigmoid(-b_u) * b_rise
        # the limits drop a NaN
        return tl.where(b_a == b_a, b_slope, b_a)
    else:
        b_bell = 0.3989422804014327 * tl.exp(-0.5 * b_a * b_a)
        return 0.5 * (1.0 + tl.erf(b_a * 0.7071067811865476)) + b_a * b_bell


@triton.jit(do_not_specialize=["rows", "n_middle", "n_inner"])
def glu_backward_kernel(
    dy,
    a,
    b,
    da,
    db,
    rows,
    n_middle,
    n_inner,
    dy_outer,
    dy_middle,
    a_outer,
    a_middle,
    b_outer,
    b_middle,
    da_outer,
    da_middle,
    db_outer,
    db_middle,
    dy_inner: tl.constexpr,
    a_inner: tl.constexpr,
    b_inner: tl.constexpr,
    da_inner: tl.constexpr,
    db_inner: tl.constexpr,
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
    o = place(i_outer, i_middle, i_inner, dy_outer, dy_middle, dy_inner, DIMS)
    b_dy = load(dy, o, o_n, m)
    o = place(i_outer, i_middle, i_inner, a_outer, a_middle, a_inner, DIMS)
    b_a = load(a, o + A, o_n, m)
    if db is not None:
        o = place(i_outer, i_middle, i_inner, db_outer, db_middle, db_inner, DIMS)
        b_db = b_dy * activate(b_a, ACT)
        tl.store(db + o + B + o_n, b_db.to(db.dtype.element_ty), mask=m)
    if da is not None:
        if b is not None:
            o = place(i_outer, i_middle, i_inner, b_outer, b_middle, b_inner, DIMS)
            b_dy *= load(b, o + B, o_n, m)
        o = place(i_outer, i_middle, i_inner, da_outer, da_middle, da_inner, DIMS)
        tl.store(da + o + A + o_n, (b_dy * slope(b_a, ACT)).to(da.dtype.element_ty), mask=m)


POINTERS = ("dy", "a", "b", "da", "db")


def plan(call: Call) -> TritonLaunch:
    shape = call["dy"].shape
    rows = rows_of(shape, [call[n] for n in POINTERS])
    sizes, strides = rows.padded()
    tile, block = tile_for(rows.count, shape[-1])
    a, b = call["offsets"]
    return TritonLaunch(
        kernel=glu_backward_kernel,
        grid=(triton.cdiv(rows.count, tile) * triton.cdiv(shape[-1], block),),
        pointers=POINTERS,
        scalars=(rows.count, sizes[1], sizes[2], *(s for p in strides for s in p[:2])),
        constants={
            **{f"{n}_inner": p[2] for n, p in zip(POINTERS, strides, strict=True)},
            "H": shape[-1],
            "ROWS": tile,
            "BLOCK": block,
            "DIMS": len(rows.sizes),
            "A": a,
            "B": b,
            "ACT": call["function"],
        },
        num_warps=4,
        alignment=min(16, call.alignment),
    )
