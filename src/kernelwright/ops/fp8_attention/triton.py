"""What attention in eight bits reads, made in Triton: the mean of some keys, then key and value in
eight bits, padded to whole tiles.

Tensor cores want the summed dimension contiguous: keys have it so, values are stored transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ...backends import Unsupported
from ...backends.triton import TritonLaunch, interpreting
from ..row.call import check_fp8
from . import reference

if TYPE_CHECKING:
    from ..plan import Call

ROWS = tl.constexpr(reference.ROWS)
LARGEST_INT = tl.constexpr(reference.LARGEST_INT)
LARGEST = tl.constexpr(reference.LARGEST)
LEAST_LOG = tl.constexpr(reference.LEAST_LOG)


@triton.jit
def int8_scales(b_largest):
    """As `fp8_scales`, for integers."""
    b_largest = tl.where(b_largest == 0.0, LARGEST_INT, b_largest)
    b_in = tl.div_rn(1.0 + 0.0 * b_largest, b_largest) * LARGEST_INT
    return b_in, b_largest * (1.0 / LARGEST_INT)


@triton.jit
def int8(b):
    # the last bit of so large a float counts 1: a sum with it is rounded to an integer, as by rint
    return (b + 12582912.0 - 12582912.0).to(tl.int8)


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


@triton.jit
def largest(b_x):
    """The largest absolute value, or NaN if one is not finite, which `tl.max` would pass over."""
    return tl.max(tl.abs(b_x)) + tl.sum(b_x * 0.0)


@triton.jit(do_not_specialize=["keys", "heads"])
def quantize_kv_kernel(
    key,
    value,
    mean,
    k8,
    v8,
    scales,
    keys,
    heads,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    D: tl.constexpr,
):
    """ROWS rows of key or value of one head. A row that is not finite gives a scale that is not."""
    i_s = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_d = tl.arange(0, D)[None, :]
    o_j = tl.arange(0, ROWS)
    o_row = (i_s * ROWS + o_j).to(tl.int64)[:, None]
    i_tile = i_bh * tl.cdiv(keys, ROWS) + i_s
    if tl.program_id(2) == 0:
        p_x = key + i_b * key_b + i_h * key_h + o_row * key_s + o_d
        b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
        b_x = tl.where(o_row < keys, b_x - tl.load(mean + i_bh * D + o_d), 0.0)
        b_in, b_out = int8_scales(largest(b_x))
        # of 16 keys, in pairs, first the even pairs: see reference.in_kernel_order
        o_16 = o_j % 16
        o_y = (o_j - o_16 + o_16 // 2 % 2 * 8 + o_16 // 4 * 2 + o_16 % 2)[:, None]
        tl.store(k8 + i_tile * ROWS * D + in_tile(o_y, o_d, D), int8(b_x * b_in))
        tl.store(scales + 4 * i_tile, b_out)
        tl.store(scales + 4 * i_tile + 2, tl.sqrt(tl.max(tl.sum(b_x * b_x, 1))))
    else:
        p_x = value + i_b * value_b + i_h * value_h + o_row * value_s + o_d
        b_x = tl.load(p_x, mask=o_row < keys, other=0.0).to(tl.float32)
        b_most = largest(b_x)
        b_most = tl.where(b_most == 0.0, LARGEST, b_most)
        # a power of two: see reference
        b_log = tl.ceil(tl.log2(b_most * (1.0 / LARGEST)))
        b_out = tl.exp2(tl.maximum(b_log, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL))
        b_y = tl.trans((b_x * (1.0 / b_out)).to(v8.dtype.element_ty))
        o_t = in_tile(tl.arange(0, D)[:, None], o_j[None, :], ROWS)
        tl.store(v8 + i_tile * ROWS * D + o_t, b_y)
        tl.store(scales + 4 * i_tile + 1, b_out)
        tl.store(scales + 4 * i_tile + 3, 0.0)


def _strides(*tensors: Any) -> tuple[int, ...]:
    """The strides of tensors whose last dimension is contiguous, without it."""
    found: list[int] = []
    for t in tensors:
        *outer, last = t.stride()
        if last != 1:
            raise Unsupported("the channels of a head are not contiguous")
        found += outer
    return tuple(found)


def _check(call: Call) -> None:
    if not interpreting() and call.target.capability[0] != 9:
        raise Unsupported("it was written for Hopper")
    check_fp8(call)


def plan_mean(call: Call) -> TritonLaunch:
    _check(call)
    key = call["key"]
    batch, heads, keys, dim = key.shape
    return TritonLaunch(
        kernel=mean_kernel,
        grid=(batch * heads,),
        pointers=("key", "mean"),
        scalars=(keys, heads, *_strides(key)),
        constants={"D": dim, "SAMPLE": reference.SAMPLE},
        num_warps=8,
        alignment=min(16, call.alignment),
    )


def plan_quantize(call: Call) -> TritonLaunch:
    _check(call)
    key, value = call["key"], call["value"]
    batch, heads, keys, dim = key.shape
    return TritonLaunch(
        kernel=quantize_kv_kernel,
        grid=(-(-keys // reference.ROWS), batch * heads, 2),
        pointers=("key", "value", "mean", "k8", "v8", "scales"),
        scalars=(keys, heads, *_strides(key, value)),
        constants={"D": dim},
        num_warps=8,
        alignment=min(16, call.alignment),
    )
