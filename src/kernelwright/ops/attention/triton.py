"""Flash-attention forward in Triton: a program per block of query rows, online softmax in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

RUNTIME = [
    "queries", "keys", "heads", "group",
    "stride_query_b", "stride_query_h", "stride_query_s",
    "stride_key_b", "stride_key_h", "stride_key_s",
    "stride_value_b", "stride_value_h", "stride_value_s",
    "stride_mask_b", "stride_mask_h", "stride_mask_q",
    "stride_out_b", "stride_out_h", "stride_out_s",
]  # fmt: skip


@triton.jit
def load_rows(
    p_tile, m_rows, o_columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr
):
    """A [rows, BLOCK] tile, zero outside; full tiles carry no mask."""
    if EDGE:
        if WIDTH == BLOCK:
            b_tile = tl.load(p_tile, mask=m_rows[:, None], other=0.0)
        else:
            b_tile = tl.load(p_tile, mask=m_rows[:, None] & (o_columns < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH == BLOCK:
            b_tile = tl.load(p_tile)
        else:
            b_tile = tl.load(p_tile, mask=(o_columns < WIDTH)[None, :], other=0.0)
    return b_tile


@triton.jit
def attend(
    b_q,
    b_out,
    b_max,
    b_sum,
    p_k,
    p_v,
    p_mask,
    scale,
    stride_k,
    stride_v,
    stride_m,
    first,
    last,
    queries,
    keys,
    o_q,
    D: tl.constexpr,
    E: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    WIDEN: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Fold keys first..last into the running maximum, sum and output of a block of queries."""
    o_j = tl.arange(0, BK)
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    for start in tl.range(first, last, BK):
        o_k = start + o_j
        m_k = o_k < keys
        o_row = o_k.to(tl.int64)[:, None]
        b_k = load_rows(p_k + (o_row * stride_k + o_d[None, :]), m_k, o_d, D, BD, EDGE)
        if WIDEN:
            b_k = b_k.to(tl.float32)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")

        if MASK == "none" and POSITIVE and not EDGE:
            # the scale rides in the exponent's fma; the maximum commutes with a positive scale
            b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
            b_ref = b_new
            b_s = b_s * scale - b_ref[:, None]
        else:
            b_s = b_s * scale
            if MASK != "none":
                p_m = p_mask + tl.zeros([1, 1], tl.int32)
                m_m = tl.full([1, 1], True, tl.int1)
                if MASK_ROWS:
                    p_m = p_m + o_q.to(tl.int64)[:, None] * stride_m
                    m_m = m_m & (o_q < queries)[:, None]
                if MASK_COLUMNS:
                    p_m = p_m + o_k[None, :]
                    if EDGE:
                        m_m = m_m & m_k[None, :]
                b_m = tl.load(p_m, mask=m_m, other=0)
                if MASK == "bool":
                    b_s = tl.where(b_m != 0, b_s, float("-inf"))
                else:
                    b_s = b_s + b_m.to(tl.float32)
            if EDGE:
                m_s = m_k[None, :]
                if CAUSAL:
                    m_s = m_s & (o_k[None, :] <= o_q[:, None])
                b_s = tl.where(m_s, b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            # no key seen yet: -inf minus -inf would be nan
            b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_s = b_s - b_ref[:, None]
        if MASK == "float":
            # in natural units until here: finfo.min times log2(e) would be -inf, and softmax of a
            # row masked by finfo.min alone is the mean of its values
            b_p = tl.exp2(b_s * LOG2E)
            b_decay = tl.exp2((b_max - b_ref) * LOG2E)
        else:
            b_p = tl.exp2(b_s)
            b_decay = tl.exp2(b_max - b_ref)
        b_max = b_new
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_out = b_out * b_decay[:, None]

        b_v = load_rows(p_v + (o_row * stride_v + o_e[None, :]), m_k, o_e, E, BE, EDGE)
        b_p = b_p.to(b_v.dtype)
        if WIDEN:
            b_p = b_p.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_out = tl.dot(b_p, b_v, b_out, input_precision="ieee")
    return b_out, b_max, b_sum


# lengths and strides vary between calls: one compiled kernel runs all of them
@triton.jit(do_not_specialize=RUNTIME)
def attention_kernel(
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
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """softmax(query @ key^T * scale + mask) @ value for rows i_q * BQ .. of one head.

    `scale` is in log2 units unless the mask is a float one. WIDEN multiplies bfloat16 as float32,
    for Triton's interpreter, which multiplies its bits as integers.
    """
    i_p = tl.program_id(0)
    blocks = tl.cdiv(queries, BQ)
    i_bh = i_p // blocks
    i_q = i_p % blocks
    if CAUSAL:
        # the last rows see the most keys: start them first, so that no long block runs last
        i_q = blocks - 1 - i_q
    i_b = (i_bh // heads).to(tl.int64)
    i_h = (i_bh % heads).to(tl.int64)
    i_g = (i_bh % heads // group).to(tl.int64)

    # strides come in units of UNIT elements: that tells the compiler how wide a load may be
    stride_q = tl.cast(stride_query_s, tl.int64) * UNIT
    stride_k = tl.cast(stride_key_s, tl.int64) * UNIT
    stride_v = tl.cast(stride_value_s, tl.int64) * UNIT
    stride_o = tl.cast(stride_out_s, tl.int64) * UNIT
    stride_m = tl.cast(stride_mask_q, tl.int64) * MASK_UNIT
    p_q = query + (i_b * stride_query_b + i_h * stride_query_h) * UNIT
    p_k = key + (i_b * stride_key_b + i_g * stride_key_h) * UNIT
    p_v = value + (i_b * stride_value_b + i_g * stride_value_h) * UNIT
    p_mask = mask
    if MASK != "none":
        p_mask = mask + (i_b * stride_mask_b + i_h * stride_mask_h) * MASK_UNIT

    o_q = i_q * BQ + tl.arange(0, BQ)
    o_d = tl.arange(0, BD)
    o_e = tl.arange(0, BE)
    o_row = o_q.to(tl.int64)[:, None]
    m_q = o_q < queries
    p_q = p_q + (o_row * stride_q + o_d[None, :])
    b_q = load_rows(p_q, m_q, o_d, D, BD, True)
    if WIDEN:
        b_q = b_q.to(tl.float32)
    b_out = tl.zeros([BQ, BE], dtype=tl.float32)
    b_max = tl.full([BQ], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BQ], dtype=tl.float32)

    # keys that every row of the block sees need no bounds and no causal mask
    last = keys
    inside = keys
    if CAUSAL:
        last = tl.minimum(keys, i_q * BQ + BQ)
        inside = tl.minimum(keys, i_q * BQ + 1)
    inside = inside // BK * BK
    b_out, b_max, b_sum = attend(
        b_q, b_out, b_max, b_sum, p_k, p_v, p_mask, scale,
        stride_k, stride_v, stride_m, 0, inside, queries, keys, o_q, D, E, BK, BD, BE,
        MASK, MASK_ROWS, MASK_COLUMNS, CAUSAL, POSITIVE, WIDEN, False,
    )  # fmt: skip
    b_out, b_max, b_sum = attend(
        b_q, b_out, b_max, b_sum, p_k, p_v, p_mask, scale,
        stride_k, stride_v, stride_m, inside, last, queries, keys, o_q, D, E, BK, BD, BE,
        MASK, MASK_ROWS, MASK_COLUMNS, CAUSAL, POSITIVE, WIDEN, True,
    )  # fmt: skip

    # a row that saw no key has sum 0 and output 0
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    p_out = out + (i_b * stride_out_b + i_h * stride_out_h) * UNIT
    p_out = p_out + (o_row * stride_o + o_e[None, :])
    m_out = m_q[:, None] & (o_e < E)[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
