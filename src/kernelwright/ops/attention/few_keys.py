"""Attention to few keys in Triton: a program holds all keys and values of a head, and loops over
blocks of query rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton import LOG2E, RUNTIME, load_rows

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_bias(
    p_mask,
    o_k,
    keys,
    MASK: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
):
    """The bias on the scores of each key, in log2 units: -inf for keys past the last."""
    m_k = o_k < keys
    if MASK == "none":
        b_bias = tl.where(m_k, 0.0, float("-inf"))
    else:
        p_m = p_mask + o_k * MASK_COLUMNS
        if MASK == "bool":
            b_seen = tl.load(p_m, mask=m_k, other=0) != 0
            b_bias = tl.where(b_seen, 0.0, float("-inf"))
        else:
            b_m = tl.load(p_m, mask=m_k, other=float("-inf")).to(tl.float32)
            # finfo.min must not become -inf: a row masked by it alone is the mean of its values
            b_bias = tl.maximum(b_m * LOG2E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
            b_bias = tl.where(b_m == float("-inf"), b_m, b_bias)
    return b_bias


# lengths and strides vary between calls: one compiled kernel runs all of them
@triton.jit(do_not_specialize=RUNTIME)
def attention_few_keys_kernel(
    query,
    key,
    value,
    mask,
    out,
    scale,
    queries,
    keys,
    heads,
    group,
    stride_query_b,
    stride_query_h,
    stride_query_s,
    stride_key_b,
    stride_key_h,
    stride_key_s,
    stride_value_b,
    stride_value_h,
    stride_value_s,
    stride_mask_b,
    stride_mask_h,
    stride_mask_q,
    stride_out_b,
    stride_out_h,
    stride_out_s,
    D: tl.constexpr,
    E: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    UNIT: tl.constexpr,
    MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """softmax(query @ key^T * scale + mask) @ value for every num_programs(1)-th block of BQ rows
    of one head; the mask is the same for each row.

    `scale` is in log2 units. BIAS: there is a mask, or fewer keys than BK, or a scale that is not
    positive. WIDEN multiplies bfloat16 as float32, for Triton's interpreter, which multiplies its
    bits as integers.
    """
    i_h = tl.program_id(0)
    i_b = tl.program_id(2).to(tl.int64)
    i_g = (i_h // group if GROUPED else i_h).to(tl.int64)
    i_h = i_h.to(tl.int64)

    # strides come in units of UNIT elements: that tells the compiler how wide a load may be
    stride_q, stride_k = stride_query_s * UNIT, stride_key_s * UNIT
    stride_v, stride_o = stride_value_s * UNIT, stride_out_s * UNIT
    p_q = query + (i_b * stride_query_b + i_h * stride_query_h) * UNIT
    p_k = key + (i_b * stride_key_b + i_g * stride_key_h) * UNIT
    p_v = value + (i_b * stride_value_b + i_g * stride_value_h) * UNIT
    p_out = out + (i_b * stride_out_b + i_h * stride_out_h) * UNIT

    o_k = tl.arange(0, BK)
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    m_k = o_k < keys
    b_k = load_rows(p_k + (o_k[:, None] * stride_k + o_d[None, :]), m_k, o_d, D, BD, BIAS)
    b_v = load_rows(p_v + (o_k[:, None] * stride_v + o_e[None, :]), m_k, o_e, E, BE, BIAS)
    if WIDEN:
        b_k = b_k.to(tl.float32)
        b_v = b_v.to(tl.float32)
    b_k = tl.trans(b_k)
    if BIAS:
        p_mask = mask
        if MASK != "none":
            p_mask = mask + (i_b * stride_mask_b + i_h * stride_mask_h) * MASK_UNIT
        b_bias = load_bias(p_mask, o_k, keys, MASK, MASK_COLUMNS)

    blocks = tl.cdiv(queries, BQ)
    o_r = tl.arange(0, BQ)
    o_q = o_r[:, None] * stride_q + o_d[None, :]
    o_out = o_r[:, None] * stride_o + o_e[None, :]
    for i_q in tl.range(tl.program_id(1), blocks, tl.num_programs(1), num_stages=STAGES):
        i_row = tl.cast(i_q, tl.int64) * BQ
        b_q = load_rows(p_q + i_row * stride_q + o_q, o_r < queries - i_q * BQ, o_d, D, BD, True)
        if WIDEN:
            b_q = b_q.to(tl.float32)
        b_s = tl.dot(b_q, b_k)
        if BIAS:
            b_s = b_s * scale + b_bias[None, :]
            b_max = tl.max(b_s, 1)
            # a row that sees no key: -inf minus -inf would be nan
            b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_p = tl.exp2(b_s - b_max[:, None])
        else:
            # the scale rides in the exponent's fma; the maximum commutes with a positive scale
            b_max = tl.max(b_s, 1) * scale
            b_p = tl.exp2(b_s * scale - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_p = b_p.to(value.dtype.element_ty)
        if WIDEN:
            b_p = b_p.to(tl.float32)
        b_out = tl.dot(b_p, b_v)
        # a row that saw no key has sum 0 and output 0
        b_out = b_out * (1.0 / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
        # recompute the row mask: reusing that of the load would keep it in registers
        m_out = (i_q * BQ + o_r < queries)[:, None]
        if E != BE:
            m_out = m_out & (o_e < E)[None, :]
        p_rows = p_out + i_row * stride_o + o_out
        tl.store(p_rows, b_out.to(out.dtype.element_ty), mask=m_out)
