"""Attention in eight bits in Triton, for Hopper.

The second operand of an fp8 product must have its summed dimension contiguous: keys have, values
are stored transposed. Buffers in fp8 are padded to whole blocks, so no load of the loop is masked.
Products of one block of keys are added to the result in registers: the tensor cores themselves keep
fewer bits of a running sum than float32 has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch, interpreting
from ..attention.tiles import Tile
from ..row.call import check_fp8
from ..row.triton import fp8_scales
from . import reference

if TYPE_CHECKING:
    from ..plan import Call

PADDING = tl.constexpr(reference.ROWS)
LARGEST_INT = tl.constexpr(reference.LARGEST_INT)
SHIFT = tl.constexpr(reference.SHIFT)
# The integer whose bits are those of the float 12582912 = 1.5 · 2 ** 23, from which on floats are 1
# apart. A product of int8 that is summed on top of it is a float already: converting them took a
# tenth of the instructions of the loop. Sums are less than 2 ** 22: 128 · 127 · 127.
AS_BITS = tl.constexpr(0x4B400000)
AS_FLOAT = tl.constexpr(12582912.0)
LOG2E = tl.constexpr(reference.LOG2E)


# By head_dim. Tile(64, 128, 4, 3) was the fastest of ten on H200 for [1, 24, 4608, 128],
# [1, 12, 32760, 128], [2, 24, 4429, 64], [2, 32, 2688, 64] and [2, 32, 8064, 64].
TILES = {64: Tile(64, 128, 4, 3), 128: Tile(64, 128, 4, 3)}
STATISTICS_ROWS = 32  # not tuned


@triton.jit
def int8_scales(b_largest):
    """As `fp8_scales`, for integers."""
    b_largest = tl.where(b_largest == 0.0, LARGEST_INT, b_largest)
    b_in = tl.div_rn(1.0 + 0.0 * b_largest, b_largest) * LARGEST_INT
    return b_in, b_largest * (1.0 / LARGEST_INT)


@triton.jit
def eight(b, kind: tl.constexpr):
    if kind == tl.int8:
        b = tl.floor(b + 0.5)
    return b.to(kind)


@triton.jit(do_not_specialize=["keys", "heads"])
def statistics_kernel(
    key,
    value,
    sums,
    largest,
    keys,
    heads,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sum of a chunk of keys, and the largest absolute value of each channel of its values."""
    i_c = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    p_k = key + i_bh // heads * key_b + i_bh % heads * key_h
    p_v = value + i_bh // heads * value_b + i_bh % heads * value_h
    o_d = tl.arange(0, D)
    b_sum = tl.zeros([ROWS, D], tl.float32)
    b_largest = tl.zeros([ROWS, D], tl.float32)
    # warps meet once, after the loop, so that it can read ahead
    for start in tl.range(0, CHUNK, ROWS, loop_unroll_factor=4):
        o_k = (i_c * CHUNK + start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        m_k = o_k < keys
        b_k = tl.load(p_k + o_k * key_s + o_d[None, :], mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + o_k * value_s + o_d[None, :], mask=m_k, other=0.0).to(tl.float32)
        b_sum += b_k
        b_largest = tl.maximum(b_largest, tl.abs(b_v))
    o_out = (i_bh * tl.num_programs(0) + i_c) * D + o_d
    tl.store(sums + o_out, tl.sum(b_sum, 0))
    tl.store(largest + o_out, tl.max(b_largest, 0))


@triton.jit(do_not_specialize=["queries", "keys", "heads", "scale"])
def quantize_qkv_kernel(
    query,
    key,
    value,
    sums,
    largest,
    q8,
    k8,
    v8,
    q_scale,
    k_scale,
    v_scale,
    queries,
    keys,
    heads,
    scale,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    """One block of PADDING rows of query, key or value of one head."""
    i_s = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_d = tl.arange(0, D)
    o_j = i_s * PADDING + tl.arange(0, PADDING)
    o_row = o_j.to(tl.int64)[:, None]
    n_q = tl.cdiv(queries, PADDING)
    n_k = tl.cdiv(keys, PADDING)
    o_c = tl.arange(0, CHUNKS_BLOCK)[:, None]
    o_stat = i_bh * CHUNKS * D + o_c * D + o_d[None, :]
    if tl.program_id(2) == 0:
        if i_s < n_q:
            p_x = query + i_b * query_b + i_h * query_h + o_row * query_s + o_d[None, :]
            b_x = tl.load(p_x, mask=o_row < queries, other=0.0).to(tl.float32)
            if INTEGERS:
                b_in, b_out = int8_scales(tl.max(tl.abs(b_x), 1))
            else:
                b_in, b_out = fp8_scales(tl.max(tl.abs(b_x), 1))
            p_y = q8 + (i_bh * n_q * PADDING + o_row) * D + o_d[None, :]
            tl.store(p_y, eight(b_x * b_in[:, None], q8.dtype.element_ty))
            tl.store(q_scale + i_bh * n_q * PADDING + o_j, b_out * scale)
    elif tl.program_id(2) == 1:
        if i_s < n_k:
            b_mean = tl.sum(tl.load(sums + o_stat, mask=o_c < CHUNKS, other=0.0), 0) / keys
            p_x = key + i_b * key_b + i_h * key_h + o_row * key_s + o_d[None, :]
            b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
            b_x = tl.where(o_row < keys, b_x - b_mean[None, :], 0.0)
            if INTEGERS:
                b_in, b_out = int8_scales(tl.max(tl.abs(b_x)))
            else:
                b_in, b_out = fp8_scales(tl.max(tl.abs(b_x)))
            # of 16 keys, in pairs, first the even pairs: see reference.in_kernel_order
            o_16 = o_row % 16
            o_y = o_row - o_16 + o_16 // 2 % 2 * 8 + o_16 // 4 * 2 + o_16 % 2
            p_y = k8 + (i_bh * n_k * PADDING + o_y) * D + o_d[None, :]
            tl.store(p_y, eight(b_x * b_in, k8.dtype.element_ty))
            tl.store(k_scale + i_bh * n_k + i_s, b_out)
    else:
        if i_s < n_k:
            b_most = tl.max(tl.load(largest + o_stat, mask=o_c < CHUNKS, other=0.0), 0)
            b_in, b_out = fp8_scales(b_most)
            p_x = value + i_b * value_b + i_h * value_h + o_row * value_s + o_d[None, :]
            b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
            b_y = tl.trans((b_x * b_in[None, :]).to(v8.dtype.element_ty))
            p_y = v8 + (i_bh * D + o_d)[:, None] * (n_k * PADDING) + o_j[None, :]
            tl.store(p_y, b_y)
            if i_s == 0:
                tl.store(v_scale + i_bh * D + o_d, b_out)


@triton.jit
def attend(
    b_q,
    b_f,
    b_out,
    b_max,
    b_sum,
    p_k,
    p_v,
    p_scale,
    start,
    keys,
    D: tl.constexpr,
    BK: tl.constexpr,
    EDGE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Fold BK keys from `start` on into the running maximum, sum and result of a block of
    queries."""
    b_k = tl.load(p_k + start * D)
    b_v = tl.load(p_v + start)
    if WIDEN:
        b_k = b_k.to(tl.float32)
        b_v = b_v.to(tl.float32)
    BQ: tl.constexpr = b_q.shape[0]
    if b_q.dtype == tl.int8:
        b_s = tl.full([BQ, BK], AS_BITS, tl.int32)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, out_dtype=tl.int32).to(tl.float32, bitcast=True)
        zero = AS_FLOAT
    else:
        b_s = tl.dot(b_q, tl.trans(b_k)).to(tl.float32)
        zero = 0.0
    # k8 is stored in another order: see reference.in_kernel_order
    b_s = b_s.reshape(BQ, BK // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BQ, BK)
    b_g = b_f * tl.load(p_scale + start // PADDING)
    if EDGE:
        o_k = start + tl.arange(0, BK)
        b_s = tl.where((o_k < keys)[None, :], b_s, float("-inf"))
    # whole numbers, so that what is rounded does not depend on the blocks before
    b_new = tl.maximum(b_max, tl.ceil((tl.max(b_s, 1) - zero) * b_g))
    b_p = tl.exp2(b_s * b_g[:, None] - (zero * b_g + b_new - SHIFT)[:, None])
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_8 = b_p.to(tl.float8e4nv)
    if WIDEN:
        b_8 = b_8.to(tl.float32)
    b_out = b_out * b_decay[:, None] + tl.dot(b_8, tl.trans(b_v))
    return b_out, b_new, b_sum


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def fp8_attention_kernel(
    q8,
    k8,
    v8,
    q_scale,
    k_scale,
    v_scale,
    out,
    queries,
    keys,
    heads,
    out_b,
    out_h,
    out_s,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """softmax(q8 · k8ᵀ) · v8ᵀ with their scales, for BQ rows of one head."""
    i_q = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    n_q = tl.cdiv(queries, PADDING) * PADDING
    n_k = tl.cdiv(keys, PADDING) * PADDING
    o_d = tl.arange(0, D)
    o_j = tl.arange(0, BK)
    o_q = i_q * BQ + tl.arange(0, BQ)
    b_q = tl.load(q8 + i_bh * n_q * D + o_q[:, None] * D + o_d[None, :])
    if WIDEN:
        b_q = b_q.to(tl.float32)
    b_f = tl.load(q_scale + i_bh * n_q + o_q)
    p_k = k8 + i_bh * n_k * D + o_j[:, None] * D + o_d[None, :]
    # n_k is a multiple of PADDING, which tells the compiler how wide a load may be
    p_v = v8 + i_bh * D * n_k + o_d[:, None] * n_k + o_j[None, :]
    p_scale = k_scale + i_bh * (n_k // PADDING)
    b_out = tl.zeros([BQ, D], tl.float32)
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    inside = keys // BK * BK
    for start in tl.range(0, inside, BK):
        b_out, b_max, b_sum = attend(
            b_q, b_f, b_out, b_max, b_sum, p_k, p_v, p_scale, start, keys, D, BK, False, WIDEN
        )
    if inside < keys:
        b_out, b_max, b_sum = attend(
            b_q, b_f, b_out, b_max, b_sum, p_k, p_v, p_scale, inside, keys, D, BK, True, WIDEN
        )
    b_v = tl.load(v_scale + i_bh * D + o_d)
    b_out = b_out / b_sum[:, None] * b_v[None, :]
    p_out = out + i_bh // heads * out_b + i_bh % heads * out_h
    p_out += o_q.to(tl.int64)[:, None] * out_s + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_q < queries)[:, None])


def _strides(*tensors: object) -> tuple[int, ...]:
    found: list[int] = []
    for t in tensors:
        *outer, last = t.stride()  # type: ignore[attr-defined]
        if last != 1:
            raise Unsupported("the channels of a head are not contiguous")
        found += outer
    return tuple(found)


def _check(call: Call) -> None:
    if not interpreting() and call.target.capability[0] != 9:
        raise Unsupported("it was written for Hopper")
    check_fp8(call)


def plan_statistics(call: Call) -> TritonLaunch:
    _check(call)
    key, value = call["key"], call["value"]
    batch, heads, keys, dim = key.shape
    return TritonLaunch(
        kernel=statistics_kernel,
        grid=(-(-keys // reference.CHUNK), batch * heads),
        pointers=("key", "value", "sums", "largest"),
        scalars=(keys, heads, *_strides(key, value)),
        constants={"D": dim, "CHUNK": reference.CHUNK, "ROWS": STATISTICS_ROWS},
        num_warps=8,
        alignment=min(16, call.alignment),
    )


def plan_quantize(call: Call) -> TritonLaunch:
    _check(call)
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, dim = query.shape
    keys, chunks = key.shape[2], call["sums"].shape[2]
    blocks = -(-max(queries, keys) // reference.ROWS)
    return TritonLaunch(
        kernel=quantize_qkv_kernel,
        grid=(blocks, batch * heads, 3),
        pointers=(
            *("query", "key", "value", "sums", "largest"),
            *("q8", "k8", "v8", "q_scale", "k_scale", "v_scale"),
        ),
        scalars=(
            *(queries, keys, heads, call["scale"] * reference.LOG2E),
            *_strides(query, key, value),
        ),
        constants={
            "D": dim,
            "CHUNKS": chunks,
            "CHUNKS_BLOCK": triton.next_power_of_2(chunks),
            "INTEGERS": call["integers"],
        },
        num_warps=8,
        alignment=min(16, call.alignment),
    )


def plan_attention(call: Call, tile: Tile | None = None) -> TritonLaunch:
    _check(call)
    query, out = call["query"], call["out"]
    batch, heads, queries, dim = query.shape
    tile = tile or TILES[dim]
    return TritonLaunch(
        kernel=fp8_attention_kernel,
        grid=(-(-queries // tile.rows), batch * heads),
        pointers=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", "out"),
        scalars=(queries, call["keys"], heads, *_strides(out)),
        constants={"D": dim, "BQ": tile.rows, "BK": tile.keys, "WIDEN": interpreting()},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
