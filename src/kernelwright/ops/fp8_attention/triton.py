"""Attention in eight bits in Triton, for Hopper: the two steps before it, and the third where CUDA
kernels cannot be compiled.

Tensor cores want the summed dimension contiguous: keys have it so, values are stored transposed.
Buffers in eight bits are padded to whole tiles, so no load of the loop is masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch, interpreting
from ..row.call import check_fp8
from ..row.triton import fp8_scales
from . import reference

if TYPE_CHECKING:
    from ..plan import Call

ROWS = tl.constexpr(reference.ROWS)
LARGEST_INT = tl.constexpr(reference.LARGEST_INT)
SHIFT = tl.constexpr(reference.SHIFT)
# The integer whose bits are those of the float 12582912 = 1.5 · 2 ** 23, from which on floats are 1
# apart. A product of int8 that is summed on top of it is a float already: converting them took a
# tenth of the instructions of the loop. Sums are less than 2 ** 22: 128 · 127 · 127.
AS_BITS = tl.constexpr(0x4B400000)
AS_FLOAT = tl.constexpr(12582912.0)
# Rows of queries, warps and pipeline stages: the fastest of twelve on H200 for [1, 24, 4608, 128],
# [1, 12, 32760, 128], [2, 24, 4429, 64] and [1, 24, 17776, 64]; more blocks on a multiprocessor, of
# fewer registers or keys, were slower.
QUERIES, WARPS, STAGES = 64, 4, 3


@triton.jit
def int8_scales(b_largest):
    """As `fp8_scales`, for integers."""
    b_largest = tl.where(b_largest == 0.0, LARGEST_INT, b_largest)
    b_in = tl.div_rn(1.0 + 0.0 * b_largest, b_largest) * LARGEST_INT
    return b_in, b_largest * (1.0 / LARGEST_INT)


@triton.jit
def int8(b):
    return tl.floor(b + 0.5).to(tl.int8)


@triton.jit
def in_tile(o_row, o_column, COLUMNS: tl.constexpr):
    """Where a tile holds an element: see reference.as_tiles."""
    blocks = o_row // 8 * (COLUMNS // 16) + o_column // 16
    return blocks * 128 + o_row % 8 * 16 + o_column % 16


@triton.jit(do_not_specialize=["keys", "heads"])
def mean_kernel(key, mean, keys, heads, key_b, key_h, key_s, D: tl.constexpr, SAMPLE: tl.constexpr):
    i_bh = tl.program_id(0).to(tl.int64)
    p_k = key + i_bh // heads * key_b + i_bh % heads * key_h
    o_d = tl.arange(0, D)
    o_k = (tl.arange(0, SAMPLE).to(tl.int64) * keys // SAMPLE)[:, None]
    b_k = tl.load(p_k + o_k * key_s + o_d[None, :]).to(tl.float32)
    tl.store(mean + i_bh * D + o_d, tl.sum(b_k, 0) / SAMPLE)


@triton.jit(do_not_specialize=["queries", "keys", "heads", "scale"])
def quantize_qkv_kernel(
    query,
    key,
    value,
    mean,
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
):
    """ROWS rows of query, key or value of one head."""
    i_s = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_d = tl.arange(0, D)[None, :]
    o_j = tl.arange(0, ROWS)
    o_row = (i_s * ROWS + o_j).to(tl.int64)[:, None]
    n_q = tl.cdiv(queries, ROWS)
    n_k = tl.cdiv(keys, ROWS)
    i_tile = i_bh * n_k + i_s
    if tl.program_id(2) == 0:
        if i_s < n_q:
            p_x = query + i_b * query_b + i_h * query_h + o_row * query_s + o_d
            b_x = tl.load(p_x, mask=o_row < queries, other=0.0).to(tl.float32)
            b_in, b_out = int8_scales(tl.max(tl.abs(b_x), 1))
            tl.store(q8 + (i_bh * n_q * ROWS + o_row) * D + o_d, int8(b_x * b_in[:, None]))
            tl.store(q_scale + (i_bh * n_q + i_s) * ROWS + o_j, b_out * scale)
    elif tl.program_id(2) == 1:
        if i_s < n_k:
            p_x = key + i_b * key_b + i_h * key_h + o_row * key_s + o_d
            b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
            b_x = tl.where(o_row < keys, b_x - tl.load(mean + i_bh * D + o_d), 0.0)
            b_in, b_out = int8_scales(tl.max(tl.abs(b_x)))
            # of 16 keys, in pairs, first the even pairs: see reference.in_kernel_order
            o_16 = o_j % 16
            o_y = (o_j - o_16 + o_16 // 2 % 2 * 8 + o_16 // 4 * 2 + o_16 % 2)[:, None]
            tl.store(k8 + i_tile * ROWS * D + in_tile(o_y, o_d, D), int8(b_x * b_in))
            tl.store(k_scale + i_tile, b_out)
    else:
        if i_s < n_k:
            p_x = value + i_b * value_b + i_h * value_h + o_row * value_s + o_d
            b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
            b_in, b_out = fp8_scales(tl.max(tl.abs(b_x)))
            b_y = tl.trans((b_x * b_in).to(v8.dtype.element_ty))
            o_y = in_tile(tl.arange(0, D)[:, None], o_j[None, :], ROWS)
            tl.store(v8 + i_tile * ROWS * D + o_y, b_y)
            tl.store(v_scale + i_tile, b_out)


@triton.jit
def attend(
    b_q,
    b_f,
    b_out,
    b_max,
    b_sum,
    p_k,
    p_v,
    p_ks,
    p_vs,
    i_k,
    keys,
    EDGE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Fold a tile of keys into the running maximum, sum and result of a block of queries."""
    BQ: tl.constexpr = b_q.shape[0]
    D: tl.constexpr = b_q.shape[1]
    b_k = tl.load(p_k + i_k * ROWS * D)
    b_v = tl.load(p_v + i_k * ROWS * D)
    if WIDEN:
        b_v = b_v.to(tl.float32)
    b_s = tl.full([BQ, ROWS], AS_BITS, tl.int32)
    b_s = tl.dot(b_q, tl.trans(b_k), b_s, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    # keys are stored in another order: see reference.in_kernel_order
    b_s = b_s.reshape(BQ, ROWS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BQ, ROWS)
    b_g = b_f * tl.load(p_ks + i_k)
    b_vs = tl.load(p_vs + i_k)
    b_lv = tl.log2(b_vs)
    if EDGE:
        b_s = tl.where((i_k * ROWS + tl.arange(0, ROWS) < keys)[None, :], b_s, float("-inf"))
    # whole numbers, so that what is rounded does not depend on the tiles before
    b_new = tl.maximum(b_max, tl.ceil((tl.max(b_s, 1) - AS_FLOAT) * b_g + b_lv))
    b_minus = b_g * AS_FLOAT + (b_new - (b_lv + SHIFT))
    b_p = tl.exp2(b_s * b_g[:, None] - b_minus[:, None])
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1) / b_vs
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
    WIDEN: tl.constexpr,
):
    """softmax(q8 · k8ᵀ) · v8ᵀ with their scales, for BQ rows of one head."""
    i_q = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    n_q = tl.cdiv(queries, ROWS) * ROWS
    n_k = tl.cdiv(keys, ROWS)
    o_d = tl.arange(0, D)
    o_j = tl.arange(0, ROWS)
    o_q = i_q * BQ + tl.arange(0, BQ)
    b_q = tl.load(q8 + (i_bh * n_q + o_q[:, None]) * D + o_d[None, :])
    b_f = tl.load(q_scale + i_bh * n_q + o_q)
    p_k = k8 + i_bh * n_k * ROWS * D + in_tile(o_j[:, None], o_d[None, :], D)
    p_v = v8 + i_bh * n_k * ROWS * D + in_tile(o_d[:, None], o_j[None, :], ROWS)
    p_ks = k_scale + i_bh * n_k
    p_vs = v_scale + i_bh * n_k
    b_out = tl.zeros([BQ, D], tl.float32)
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    inside = keys // ROWS
    for i_k in tl.range(0, inside):
        b_out, b_max, b_sum = attend(
            b_q, b_f, b_out, b_max, b_sum, p_k, p_v, p_ks, p_vs, i_k, keys, False, WIDEN
        )
    if inside < n_k:
        b_out, b_max, b_sum = attend(
            b_q, b_f, b_out, b_max, b_sum, p_k, p_v, p_ks, p_vs, inside, keys, True, WIDEN
        )
    b_out = b_out / b_sum[:, None]
    p_out = out + i_bh // heads * out_b + i_bh % heads * out_h
    p_out += o_q.to(tl.int64)[:, None] * out_s + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_q < queries)[:, None])


def strides_of(*tensors: Any) -> tuple[int, ...]:
    """The strides of tensors whose last dimension is contiguous, without it."""
    found: list[int] = []
    for t in tensors:
        *outer, last = t.stride()
        if last != 1:
            raise Unsupported("the channels of a head are not contiguous")
        found += outer
    return tuple(found)


def check_hopper(call: Call) -> None:
    if not interpreting() and call.target.capability[0] != 9:
        raise Unsupported("it was written for Hopper")
    check_fp8(call)


def plan_mean(call: Call) -> TritonLaunch:
    check_hopper(call)
    key = call["key"]
    batch, heads, keys, dim = key.shape
    return TritonLaunch(
        kernel=mean_kernel,
        grid=(batch * heads,),
        pointers=("key", "mean"),
        scalars=(keys, heads, *strides_of(key)),
        constants={"D": dim, "SAMPLE": reference.SAMPLE},
        num_warps=8,
        alignment=min(16, call.alignment),
    )


def plan_quantize(call: Call) -> TritonLaunch:
    check_hopper(call)
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    return TritonLaunch(
        kernel=quantize_qkv_kernel,
        grid=(-(-max(queries, keys) // reference.ROWS), batch * heads, 3),
        pointers=(
            *("query", "key", "value", "mean"),
            *("q8", "k8", "v8", "q_scale", "k_scale", "v_scale"),
        ),
        scalars=(
            *(queries, keys, heads, call["scale"] * reference.LOG2E),
            *strides_of(query, key, value),
        ),
        constants={"D": dim},
        num_warps=8,
        alignment=min(16, call.alignment),
    )


def plan_attention(call: Call) -> TritonLaunch:
    check_hopper(call)
    query, out = call["query"], call["out"]
    batch, heads, queries, dim = query.shape
    return TritonLaunch(
        kernel=fp8_attention_kernel,
        grid=(-(-queries // QUERIES), batch * heads),
        pointers=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", "out"),
        scalars=(queries, call["keys"], heads, *strides_of(out)),
        constants={"D": dim, "BQ": QUERIES, "WIDEN": interpreting()},
        num_warps=WARPS,
        num_stages=STAGES,
    )
