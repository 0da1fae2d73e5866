"""The backward of the rotary kernel in Triton: a program takes a run of rows of query or key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends import Unsupported
from ...backends.triton import TritonLaunch
from ..backward import Step, Values
from ..row.backward_triton import MAX_WIDTH, PER_THREAD, runs, tile_for
from ..row.triton import locate, place
from ..row_sums import sums_of
from .call import merge_heads, rows_by_table
from .kernel import RopeKernel
from .tables import over_rows
from .triton import columns, load_pairs, load_table

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def store_pairs(
    p, o_n, b_a, b_b, m, ROWS: tl.constexpr, U: tl.constexpr, D: tl.constexpr, LAYOUT: tl.constexpr
):
    if LAYOUT == "interleaved":
        b = tl.reshape(tl.join(b_a, b_b), (ROWS, 2 * U))
        tl.store(p + o_n, b.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o_n, b_a.to(p.dtype.element_ty), mask=m)
        tl.store(p + o_n + D // 2, b_b.to(p.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows", "chunk", "n_middle", "n_inner"])
def rope_backward_kernel(
    dy,
    x,
    weight,
    cos,
    sin,
    dx,
    partials,
    rows,
    chunk,
    n_middle,
    n_inner,
    cos_outer,
    cos_middle,
    sin_outer,
    sin_middle,
    dy_outer,
    dy_middle,
    x_outer,
    x_middle,
    dx_outer,
    dx_middle,
    eps,
    cos_inner: tl.constexpr,
    sin_inner: tl.constexpr,
    dy_inner: tl.constexpr,
    x_inner: tl.constexpr,
    dx_inner: tl.constexpr,
    PAIRS: tl.constexpr,
    U: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    D: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALF_TABLE: tl.constexpr,
    NORM: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    o_n = columns(0, U, D, LAYOUT)
    m_u = tl.arange(0, U)[None, :] < PAIRS
    m_n = (o_n < 2 * PAIRS) if LAYOUT == "interleaved" else m_u
    if weight is not None:
        b_wa, b_wb = load_pairs(weight, 0, o_n, m_n, 1, U, D, LAYOUT)
    if partials is not None:
        b_dwa = tl.zeros([ROWS, U], tl.float32)
        b_dwb = tl.zeros([ROWS, U], tl.float32)
    for i in range(0, chunk, ROWS):
        i_row = i_program * chunk + i + tl.arange(0, ROWS)
        m_row = (i_row < rows)[:, None]
        m = m_row & m_n
        i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
        o = place(i_outer, i_middle, i_inner, dy_outer, dy_middle, dy_inner, DIMS)
        b_a, b_b = load_pairs(dy, o, o_n, m, ROWS, U, D, LAYOUT)
        if cos is not None:
            o = place(i_outer, i_middle, i_inner, cos_outer, cos_middle, cos_inner, DIMS)
            b_ca, b_cb = load_table(cos, o, o_n, m, m_row & m_u, 0, ROWS, U, D, LAYOUT, HALF_TABLE)
            o = place(i_outer, i_middle, i_inner, sin_outer, sin_middle, sin_inner, DIMS)
            b_sa, b_sb = load_table(sin, o, o_n, m, m_row & m_u, 0, ROWS, U, D, LAYOUT, HALF_TABLE)
            # forward: (a, b) -> (a ca - b sa, b cb + a sb)
            b_left = b_a * b_ca + b_b * b_sb
            b_right = b_b * b_cb - b_a * b_sa
            b_a = b_left
            b_b = b_right
        if NORM:
            o = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
            b_na, b_nb = load_pairs(x, o, o_n, m, ROWS, U, D, LAYOUT)
            b_mean = tl.sum(b_na * b_na + b_nb * b_nb, 1) / (2 * PAIRS) + eps
            b_rstd = tl.div_rn(1.0 + 0.0 * b_mean, tl.sqrt_rn(b_mean))[:, None]
            b_na *= b_rstd
            b_nb *= b_rstd
            if partials is not None:
                # what lies outside of the rows was loaded as zeros
                b_dwa += b_a * b_na
                b_dwb += b_b * b_nb
            if weight is not None:
                b_a *= b_wa
                b_b *= b_wb
            b_along = (tl.sum(b_a * b_na + b_b * b_nb, 1) / (2 * PAIRS))[:, None]
            b_a = (b_a - b_na * b_along) * b_rstd
            b_b = (b_b - b_nb * b_along) * b_rstd
        if dx is not None:
            o = place(i_outer, i_middle, i_inner, dx_outer, dx_middle, dx_inner, DIMS)
            store_pairs(dx + o, o_n, b_a, b_b, m, ROWS, U, D, LAYOUT)
    if partials is not None:
        p = partials + i_program * (2 * PAIRS)
        b_a = tl.sum(b_dwa, 0)[None, :]
        b_b = tl.sum(b_dwb, 0)[None, :]
        store_pairs(p, o_n, b_a, b_b, m_n, 1, U, D, LAYOUT)


def steps(
    parts: RopeKernel,
    sides: Sequence[tuple[str, str, str]],
    grads: Values,
    values: Values,
    outs: dict[str, Tensor],
) -> Iterator[Step]:
    """The launches that write the gradients of query, key and their weights."""
    cos, sin = (values.get(n) if n else None for n in (parts.cos, parts.sin))
    across = bool(values.get("across_heads"))
    for x_name, weight_name, out in sides:
        wanted = [n for n in (x_name, weight_name) if n in outs]
        if not wanted:
            continue
        dy, x, dx = grads[out], values.get(x_name), outs.get(x_name)
        rotation = dy.shape[-1]
        if across and dy.ndim == 4:
            whole = dy.shape[2] * dy.shape[3]
            if cos is not None and cos.ndim < 4 and cos.shape[-1] in (whole, whole // 2):
                rotation = whole
            # attention may have left the heads of a token apart
            dy, x = (_merged(t, x_name) for t in (dy, x))
            dx = None if dx is None else merge_heads(dx, x_name)
        width = dy.shape[-1]
        if width > MAX_WIDTH:
            raise Unsupported(f"width {width}; the backward holds rows of up to {MAX_WIDTH}")
        rows = dy.numel() // width
        summing = weight_name in outs
        chunk, programs = runs(rows, 1, width, summing)
        partials = dy.new_empty((1, programs, width), dtype=torch.float32) if summing else None
        yield Step(
            plan,
            {
                "dy": dy,
                "x": x if parts.norm else None,
                "weight": values.get(weight_name) if weight_name else None,
                "cos": cos,
                "sin": sin,
                "dx": dx,
                "partials": partials,
                "chunk": chunk,
                "programs": programs,
                "rotation": rotation,
                "layout": values["layout"],
                "norm": parts.norm,
                "eps": float(values.get("eps", 0.0)),
            },
        )
        if partials is not None:
            yield sums_of(partials, outs[weight_name])


def _merged(t: Tensor | None, part: str) -> Tensor | None:
    return (
        None if t is None else merge_heads(t if t.stride(2) == t.shape[3] else t.contiguous(), part)
    )


def plan(call: Call) -> TritonLaunch:
    dy, rotation = call["dy"], call["rotation"]
    cos, sin = (None if call[n] is None else over_rows(call[n], dy) for n in ("cos", "sin"))
    found = rows_by_table(dy, cos, sin, [call[n] for n in ("dy", "x", "dx")])
    sizes, strides = found.padded()
    pairs = dy.shape[-1] // 2
    tile, block = tile_for(dy.shape[-1])
    warps = max(1, min(16, tile * block // (32 * PER_THREAD)))
    inner: dict[str, Any] = {
        f"{n}_inner": p[2] for n, p in zip(("cos", "sin", "dy", "x", "dx"), strides, strict=True)
    }
    return TritonLaunch(
        kernel=rope_backward_kernel,
        grid=(call["programs"],),
        pointers=("dy", "x", "weight", "cos", "sin", "dx", "partials"),
        scalars=(
            found.count,
            call["chunk"],
            sizes[1],
            sizes[2],
            *(s for p in strides for s in p[:2]),
            call["eps"],
        ),
        constants={
            **inner,
            "PAIRS": pairs,
            "U": block // 2,
            "ROWS": tile,
            "DIMS": len(found.sizes),
            "D": rotation,
            "LAYOUT": call["layout"],
            "HALF_TABLE": call["cos"] is not None and call["cos"].shape[-1] != rotation,
            "NORM": call["norm"],
        },
        num_warps=1 << (warps.bit_length() - 1),
        alignment=min(16, call.alignment),
    )
