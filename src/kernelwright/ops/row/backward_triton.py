"""The backward of the row kernel in Triton, and the sums over rows that it leaves.

A program takes a run of rows, writes their gradients, and adds up what the rows share (weights,
modulations, gates) in registers; its sums go to `partials` [sums, groups, programs, N]. The second
kernel adds the programs' sums in a fixed order. No atomics, and the runs follow from the shapes
alone: gradients repeat bit for bit, on every GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends import Unsupported
from ...backends.triton import TritonLaunch
from ..backward import Step
from ..row_sums import sums_of
from ..rows import rows_of
from .call import SHARED, over_rows
from .reference import summed
from .triton import load, locate, operand, place

if TYPE_CHECKING:
    from ..plan import Call


@triton.jit
def mean(b, N: tl.constexpr):
    """The mean of each row. Rows of one value must have no deviation, and the usual division leaves
    some; one in float32 that rounds correctly takes registers that wide rows do not have."""
    b_sum = tl.sum(b, 1).to(tl.float64)
    return (b_sum * tl.full(b_sum.shape, 1.0 / N, tl.float64)).to(tl.float32)


@triton.jit
def keep(part, b, row_out, i_row, m, o_n, N: tl.constexpr, SLOT: tl.constexpr):
    """Add a row's contribution to its sum, or store it where no other row shares it."""
    if row_out is not None:
        tl.store(row_out + i_row[:, None] * N + o_n, b.to(row_out.dtype.element_ty), mask=m)
    if SLOT >= 0:
        part += tl.where(m, b, 0.0)
    return part


@triton.jit
def leave(partials, part, i_program, programs, o_n, N: tl.constexpr, SLOT: tl.constexpr):
    """Store a program's sum over its rows."""
    if SLOT >= 0:
        p = partials + (SLOT * programs.to(tl.int64) + i_program) * N + o_n
        tl.store(p, tl.sum(part, 0)[None, :], mask=o_n < N)


@triton.jit(do_not_specialize=["group", "chunk", "per_group", "programs", "n_middle", "n_inner"])
def row_backward_kernel(
    dy,
    dsum,
    s,
    x,
    gate,
    weight,
    bias,
    scale,
    shift,
    out_gate,
    dx,
    dresidual,
    dscale,
    dshift,
    dgate,
    dout_gate,
    partials,
    group,
    chunk,
    per_group,
    programs,
    n_middle,
    n_inner,
    dy_outer,
    dy_middle,
    dsum_outer,
    dsum_middle,
    s_outer,
    s_middle,
    x_outer,
    x_middle,
    gate_outer,
    gate_middle,
    scale_outer,
    scale_middle,
    shift_outer,
    shift_middle,
    out_gate_outer,
    out_gate_middle,
    dx_outer,
    dx_middle,
    dresidual_outer,
    dresidual_middle,
    eps,
    dy_inner: tl.constexpr,
    dsum_inner: tl.constexpr,
    s_inner: tl.constexpr,
    x_inner: tl.constexpr,
    gate_inner: tl.constexpr,
    scale_inner: tl.constexpr,
    shift_inner: tl.constexpr,
    out_gate_inner: tl.constexpr,
    dx_inner: tl.constexpr,
    dresidual_inner: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    GATE: tl.constexpr,
    OUT_GATE: tl.constexpr,
):
    """WEIGHT .. OUT_GATE: which of the sums is the part's, -1 for none."""
    i_program = tl.program_id(0).to(tl.int64)
    i_group = i_program // per_group
    i_first = i_program % per_group * chunk
    o_n = tl.arange(0, BLOCK)[None, :]
    m_n = o_n < N
    b_w = operand(weight, 0, o_n, m_n, 1.0)
    b_b = operand(bias, 0, o_n, m_n, 0.0)
    b_dw = tl.zeros([ROWS, BLOCK], tl.float32) if WEIGHT >= 0 else 0.0
    b_db = tl.zeros([ROWS, BLOCK], tl.float32) if BIAS >= 0 else 0.0
    b_dc = tl.zeros([ROWS, BLOCK], tl.float32) if SCALE >= 0 else 0.0
    b_dh = tl.zeros([ROWS, BLOCK], tl.float32) if SHIFT >= 0 else 0.0
    b_dg = tl.zeros([ROWS, BLOCK], tl.float32) if GATE >= 0 else 0.0
    b_do = tl.zeros([ROWS, BLOCK], tl.float32) if OUT_GATE >= 0 else 0.0

    for i in range(0, chunk, ROWS):
        i_here = i_first + i + tl.arange(0, ROWS)
        i_row = i_group * group + i_here
        # the last program of a group may end early, inside its last rows or before
        m = (i_here < group)[:, None] & (i + tl.arange(0, ROWS) < chunk)[:, None] & m_n
        i_outer, i_middle, i_inner = locate(i_row, n_middle, n_inner, DIMS)
        b_ds = tl.zeros([ROWS, BLOCK], tl.float32)
        if dy is not None:
            o = place(i_outer, i_middle, i_inner, dy_outer, dy_middle, dy_inner, DIMS)
            b_dy = load(dy, o, o_n, m)
            b_n = 0.0
            if s is not None:
                o = place(i_outer, i_middle, i_inner, s_outer, s_middle, s_inner, DIMS)
                b_n = load(s, o, o_n, m)
            o = place(i_outer, i_middle, i_inner, scale_outer, scale_middle, scale_inner, DIMS)
            b_c = operand(scale, o, o_n, m, 0.0)
            o = place(i_outer, i_middle, i_inner, shift_outer, shift_middle, shift_inner, DIMS)
            b_h = operand(shift, o, o_n, m, 0.0)
            o = place(
                i_outer, i_middle, i_inner, out_gate_outer, out_gate_middle, out_gate_inner, DIMS
            )
            b_o = operand(out_gate, o, o_n, m, 1.0)
            if NORM == "layer":
                b_n = tl.where(m, b_n - mean(b_n, N)[:, None], 0.0)
                # the deviations sum to the rounding error of the mean: subtract it
                b_n = tl.where(m, b_n - mean(b_n, N)[:, None], 0.0)
            if NORM != "none":
                b_mean = mean(b_n * b_n, N) + eps
                # one value per row, so correct rounding is cheap
                b_rstd = tl.div_rn(1.0 + 0.0 * b_mean, tl.sqrt_rn(b_mean))[:, None]
                b_n *= b_rstd
            b_a = b_n * b_w + b_b
            b_do = keep(
                b_do, b_dy * (b_a * (1.0 + b_c) + b_h), dout_gate, i_row, m, o_n,
                N, OUT_GATE,
            )  # fmt: skip
            b_dm = b_dy * b_o
            b_dh = keep(b_dh, b_dm, dshift, i_row, m, o_n, N, SHIFT)
            b_dc = keep(b_dc, b_dm * b_a, dscale, i_row, m, o_n, N, SCALE)
            b_da = b_dm * (1.0 + b_c)
            b_db = keep(b_db, b_da, None, i_row, m, o_n, N, BIAS)
            b_dw = keep(b_dw, b_da * b_n, None, i_row, m, o_n, N, WEIGHT)
            b_dn = b_da * b_w
            if NORM != "none":
                b_along = mean(b_dn * b_n, N)[:, None]
                if NORM == "layer":
                    b_dn -= mean(tl.where(m, b_dn, 0.0), N)[:, None]
                b_dn = (b_dn - b_n * b_along) * b_rstd
            b_ds += b_dn
        if dsum is not None:
            # last, because it would hold registers during the reductions
            o = place(i_outer, i_middle, i_inner, dsum_outer, dsum_middle, dsum_inner, DIMS)
            b_ds += load(dsum, o, o_n, m)
        if dresidual is not None:
            o = place(
                i_outer, i_middle, i_inner, dresidual_outer, dresidual_middle, dresidual_inner, DIMS
            )
            tl.store(dresidual + o + o_n, b_ds.to(dresidual.dtype.element_ty), mask=m)
        if x is not None:
            o = place(i_outer, i_middle, i_inner, x_outer, x_middle, x_inner, DIMS)
            b_dg = keep(
                b_dg, b_ds * load(x, o, o_n, m), dgate, i_row, m, o_n, N, GATE
            )  # fmt: skip
        if dx is not None:
            o = place(i_outer, i_middle, i_inner, gate_outer, gate_middle, gate_inner, DIMS)
            b_dx = b_ds * operand(gate, o, o_n, m, 1.0)
            o = place(i_outer, i_middle, i_inner, dx_outer, dx_middle, dx_inner, DIMS)
            tl.store(dx + o + o_n, b_dx.to(dx.dtype.element_ty), mask=m)

    leave(partials, b_dw, i_program, programs, o_n, N, WEIGHT)
    leave(partials, b_db, i_program, programs, o_n, N, BIAS)
    leave(partials, b_dc, i_program, programs, o_n, N, SCALE)
    leave(partials, b_dh, i_program, programs, o_n, N, SHIFT)
    leave(partials, b_dg, i_program, programs, o_n, N, GATE)
    leave(partials, b_do, i_program, programs, o_n, N, OUT_GATE)


# Chosen by reasoning, not yet tuned: 4 programs per multiprocessor of an H200, a number that all
# GPUs take so that sums have the same bits on all; the elements of a tile of narrow rows; the
# elements per thread.
PROGRAMS, NARROW, PER_THREAD = 528, 1024, 8
# a wider row and its sums do not fit the registers of a block
MAX_WIDTH = 16384
PLACED = ("dy", "dsum", "s", "x", "gate", "scale", "shift", "out_gate", "dx", "dresidual")
ROW_OUTS = ("dscale", "dshift", "dgate", "dout_gate")


def steps(
    dy: Tensor | None,
    dsum: Tensor | None,
    parts: Mapping[str, Tensor | None],
    norm: str,
    eps: float,
    outs: Mapping[str, Tensor],
) -> Iterator[Step]:
    """The launches that write the gradients `outs` of the parts."""
    rows = dy if dy is not None else dsum
    assert rows is not None
    width = rows.shape[-1]
    if width > MAX_WIDTH:
        raise Unsupported(f"width {width}; the backward holds rows of up to {MAX_WIDTH}")
    there = [p for p in SHARED if parts[p] is not None]
    shaped = over_rows([rows, *(parts[p] for p in there)], rows)
    lead, *shapes = (t.shape[:-1] for t in shaped if t is not None)
    count = math.prod(lead)
    # in how many runs of neighbouring rows each part changes; None if the rows lie apart
    groups = {p: _groups(shape, lead) for p, shape in zip(there, shapes, strict=True)}
    alone = {p for p in there if groups[p] == count and p not in ("weight", "bias")}
    summed_parts = [p for p in SHARED if p in outs and p not in alone and groups[p] is not None]
    # by the parts that are there, wanted or not: a gradient alone has the bits of all together
    most = max((groups[p] or 1 for p in there if p not in alone), default=1)
    chunk, per_group = runs(count, most, width, bool(summed_parts))
    partials = (
        rows.new_empty((len(summed_parts), most, per_group, width), dtype=torch.float32)
        if summed_parts
        else None
    )
    scattered = {
        p: rows.new_empty((*lead, width), dtype=torch.float32)
        for p in outs
        if p in SHARED and groups[p] is None
    }
    direct = {p: outs[p] for p in outs if p in alone} | scattered
    yield Step(
        plan,
        {
            "dy": dy,
            "dsum": dsum,
            **{p: parts[p] for p in ("s", "gate", *SHARED[:4], "out_gate")},
            "x": parts["x"] if "gate" in outs else None,
            "dx": outs.get("x"),
            "dresidual": outs.get("residual"),
            **{f"d{p}": direct.get(p) for p in SHARED},
            "partials": partials,
            "norm": norm,
            "eps": eps,
            "groups": most,
            "chunk": chunk,
            "per_group": per_group,
            **{f"slot {p}": summed_parts.index(p) if p in summed_parts else -1 for p in SHARED},
        },
    )
    for slot, p in enumerate(summed_parts):
        assert partials is not None
        own = groups[p]
        assert own is not None
        yield sums_of(partials[slot].view(own, -1, width), outs[p])
    for p, full in scattered.items():
        outs[p].copy_(summed(full.reshape(rows.shape), outs[p]))


def _groups(shape: tuple[int, ...], lead: tuple[int, ...]) -> int | None:
    """In how many runs of neighbouring rows a part of this leading shape changes; None if the rows
    that share it lie apart, such as [1, S, D] over [B, S, D]."""
    shape = (1,) * (len(lead) - len(shape)) + shape
    found, ended = 1, False
    for own, size in zip(shape, lead, strict=True):
        if own != size:
            ended = True
        elif size > 1 and ended:
            return None
        else:
            found *= own
    return found


def runs(rows: int, groups: int, width: int, sums: bool) -> tuple[int, int]:
    """Rows of a program, and the programs of each group of rows; more where nothing is summed."""
    tile, _ = tile_for(width)
    group = rows // groups
    chunk = triton.cdiv(group, max(1, PROGRAMS // groups)) if sums else 1
    chunk = triton.cdiv(chunk, tile) * tile
    return chunk, triton.cdiv(group, chunk)


def tile_for(width: int) -> tuple[int, int]:
    """Rows of a tile and the block that holds one."""
    block = triton.next_power_of_2(width)
    return max(1, NARROW // block), block


def plan(call: Call) -> TritonLaunch:
    rows = call["dy"] if call["dy"] is not None else call["dsum"]
    width = rows.shape[-1]
    shaped = over_rows([rows, *(call[p] for p in PLACED)], rows)
    assert shaped[0] is not None
    found = rows_of(shaped[0].shape, shaped[1:])
    sizes, strides = found.padded()
    tile, block = tile_for(width)
    # without a norm ptxas takes few registers for 16 warps, and spills one at 4608x3072 on sm_90
    each = PER_THREAD if call["norm"] != "none" else 2 * PER_THREAD
    warps = max(1, min(16, tile * block // (32 * each)))
    per_group, groups = call["per_group"], call["groups"]
    pointers = (*PLACED[:5], "weight", "bias", *PLACED[5:], *ROW_OUTS, "partials")
    return TritonLaunch(
        kernel=row_backward_kernel,
        grid=(groups * per_group,),
        pointers=pointers,
        scalars=(
            found.count // groups,
            call["chunk"],
            per_group,
            groups * per_group,
            sizes[1],
            sizes[2],
            *(s for place in strides for s in place[:2]),
            float(call["eps"]),
        ),
        constants={
            **{f"{p}_inner": place[2] for p, place in zip(PLACED, strides, strict=True)},
            "N": width,
            "BLOCK": block,
            "ROWS": tile,
            "DIMS": len(found.sizes),
            "NORM": call["norm"],
            **{p.upper(): call[f"slot {p}"] for p in SHARED},
        },
        num_warps=1 << (warps.bit_length() - 1),
        alignment=min(16, call.alignment),
    )
