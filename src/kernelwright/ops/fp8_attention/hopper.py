"""Attention in eight bits for Hopper in Gluon, Triton's language with explicit layouts.

A program attends with 128 queries: with 64, which is what a multiprocessor holds twice, reading
keys and values from the L2 cache is what limits head_dim 128. While the probabilities of a block of
keys are computed, the tensor cores multiply those of the block before with its values. Products of
one block are added to the result in registers: the tensor cores themselves keep fewer bits of a
running sum than float32 has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from . import reference

# renamed in Triton 3.9
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

PADDING = gl.constexpr(reference.ROWS)
SHIFT = gl.constexpr(reference.SHIFT)
ABOVE = gl.constexpr(reference.ABOVE)


# Four scores x, as 8 · (x + 7 - ABOVE), to four bytes of e4m3 that stand for 2 ** x: by exp2 and
# rounding,
EXP2 = gl.constexpr("""
{
.reg .b16 low, high;
.reg .f32 a, b, c, d;
fma.rn.f32 a, $1, 0f3E000000, 0fC0DE2824;
fma.rn.f32 b, $2, 0f3E000000, 0fC0DE2824;
fma.rn.f32 c, $3, 0f3E000000, 0fC0DE2824;
fma.rn.f32 d, $4, 0f3E000000, 0fC0DE2824;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
ex2.approx.ftz.f32 c, c;
ex2.approx.ftz.f32 d, d;
cvt.rn.satfinite.e4m3x2.f32 low, b, a;
cvt.rn.satfinite.e4m3x2.f32 high, d, c;
mov.b32 $0, {high, low};
}
""")
# by a line: between powers of two the values of e4m3 lie on one, so the byte is this number
# rounded (half floats from 1024 on are 1 apart: the low byte of x + 1024 is x rounded),
LINE = gl.constexpr("""
{
.reg .b32 low, high, magic;
mov.b32 magic, 0x64006400;
cvt.rn.relu.f16x2.f32 low, $2, $1;
cvt.rn.relu.f16x2.f32 high, $4, $3;
add.rn.f16x2 low, low, magic;
add.rn.f16x2 high, high, magic;
prmt.b32 $0, low, high, 0x2064;
}
""")
# or two of four this and two the other way: they take different units of the GPU
BOTH = gl.constexpr("""
{
.reg .b32 low, high, magic;
.reg .b16 first, zero;
.reg .f32 a, b;
mov.b32 magic, 0x64006400;
mov.b16 zero, 0;
fma.rn.f32 a, $1, 0f3E000000, 0fC0DE2824;
fma.rn.f32 b, $2, 0f3E000000, 0fC0DE2824;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
cvt.rn.satfinite.e4m3x2.f32 first, b, a;
mov.b32 low, {first, zero};
cvt.rn.relu.f16x2.f32 high, $4, $3;
add.rn.f16x2 high, high, magic;
prmt.b32 $0, low, high, 0x1064;
}
""")


@gluon.jit
def four(b, ASM: gl.constexpr):
    """Four neighbours of a row in fp8 as one integer, [M, N] -> [M, N / 4], its halves swapped: as
    eight bits each they would be taken apart and joined again wherever the loop carries them."""
    b_even, b_odd = gl.split(b.reshape([b.shape[0], b.shape[1] // 4, 2, 2]))
    b_0, b_2 = gl.split(b_even)
    b_1, b_3 = gl.split(b_odd)
    return gl.inline_asm_elementwise(
        ASM, "=r,f,f,f,f", [b_0, b_1, b_2, b_3], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def swapped(b):
    """The halves of integers, put right in other registers. Those of `b` are written while a
    product runs: if they were operands themselves, ptxas would let no two products run at once. Not
    pure, so that it comes after the wait for the product that reads these registers."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x1032;", "=r,r", [b], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def operand(b, LAYOUT: gl.constexpr):
    """What `four` packed and `swapped` put right, as fp8."""
    b = gl.join(gl.join(b, b), gl.join(b, b)).reshape([b.shape[0], b.shape[1] * 4])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [gl.convert_layout(b, LAYOUT)],
        dtype=gl.float8e4nv,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def probabilities(
    b_s,
    b_f,
    b_max,
    scale,
    keys,
    EDGE: gl.constexpr,
    EXP: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Of scores: probabilities in fp8 as an operand of the next product, the new maximum."""
    BQ: gl.constexpr = b_s.shape[0]
    BK: gl.constexpr = b_s.shape[1]
    # in this order of keys, to which quantize_qkv_kernel stores them, what a thread holds of the
    # scores is what it holds of the operand
    b_s = b_s.reshape([BQ, BK // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([BQ, BK])
    b_s = gl.convert_layout(b_s, OPERAND).to(gl.float32)
    if EDGE:
        o_k = gl.arange(0, BK, gl.SliceLayout(0, OPERAND))
        b_s = gl.where((o_k < keys)[None, :], b_s, float("-inf"))
    b_g = b_f * scale
    # whole numbers, so that what is rounded does not depend on the blocks before
    b_new = gl.maximum(b_max, gl.ceil(gl.max(b_s, 1) * b_g))
    b_x = b_s * (b_g * 8.0)[:, None] - (b_new * 8.0 - 8.0 * (SHIFT + 7 - ABOVE))[:, None]
    return four(b_x, EXP), b_new


@gluon.jit
def request(p, o, s, turn, blocks, STRIDE: gl.constexpr, STAGES: gl.constexpr):
    """Start to load the block of keys or values of a turn: after the first, which takes the last
    block, because only there keys are masked, they are in order. Turns beyond load any block."""
    copy_to_shared(s.index(turn % STAGES), p + (gl.minimum(turn, blocks) - 1) * STRIDE + o)


@gluon.jit
def half(b):
    """Every second column: all are the same."""
    return gl.split(b.reshape([b.shape[0], b.shape[1] // 2, 2]))[0]


@gluon.jit
def add_values(b_out, b_sum, b_o, b_n, b_decay, OUT: gl.constexpr):
    """The products of a block, added to what the blocks before left."""
    b_out = b_out * gl.convert_layout(b_decay, gl.SliceLayout(1, OUT))[:, None] + b_o
    LEFT: gl.constexpr = gl.SliceLayout(1, b_sum.type.layout)
    b_sum = b_sum * gl.convert_layout(b_decay, LEFT)[:, None] + half(b_n)
    return b_out, b_sum


@gluon.jit(do_not_specialize=["queries", "keys", "heads"])
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
    D: gl.constexpr,
    BQ: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    EXP: gl.constexpr,
):
    """softmax(q8 · k8ᵀ) · v8ᵀ with their scales, for BQ rows of one head."""
    W: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BK, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 32])
    ONE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 8, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    BY_D: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [W, 1], [1, 0])
    BY_K: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BK, BK // 16], [W, 1], [1, 0])
    i_q = gl.program_id(0)
    i_bh = gl.program_id(1).to(gl.int64)
    n_q = gl.cdiv(queries, PADDING) * PADDING
    n_k = gl.cdiv(keys, PADDING) * PADDING
    blocks = n_k // BK
    o_d = gl.arange(0, D, gl.SliceLayout(0, BY_D))
    o_q = i_q * BQ + gl.arange(0, BQ, gl.SliceLayout(1, BY_D))
    p_q = q8 + i_bh * n_q * D + o_q[:, None] * D + o_d[None, :]
    o_j = gl.arange(0, BK, gl.SliceLayout(1, BY_D))
    p_k = k8 + i_bh * n_k * D
    o_k = o_j[:, None] * D + o_d[None, :]
    o_e = gl.arange(0, D, gl.SliceLayout(1, BY_K))
    o_i = gl.arange(0, BK, gl.SliceLayout(0, BY_K))
    # n_k is a multiple of PADDING, which tells the compiler how wide a load may be
    p_v = v8 + i_bh * D * n_k
    o_v = o_e[:, None] * n_k + o_i[None, :]
    p_scale = k_scale + i_bh * (n_k // PADDING)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, D], k8.dtype.element_ty)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, BK], v8.dtype.element_ty)
    s_q = gl.allocate_shared_memory(q8.dtype.element_ty, [BQ, D], KEYS)
    s_k = gl.allocate_shared_memory(k8.dtype.element_ty, [STAGES, BK, D], KEYS)
    s_v = gl.allocate_shared_memory(v8.dtype.element_ty, [STAGES, D, BK], VALUES)
    b_one = gl.full([8, BK], 0x38, gl.uint8, BY_K).to(v8.dtype.element_ty, bitcast=True)
    s_one = gl.allocate_shared_memory(v8.dtype.element_ty, [8, BK], VALUES, b_one)
    # of one group: the keys of a turn and the values of the turn before, as they are multiplied
    copy_to_shared(s_q, p_q)
    copy_to_shared(s_k.index(0), p_k + (blocks - 1) * (BK * D) + o_k)
    async_copy.commit_group()
    copy_to_shared(s_v.index(0), p_v + (blocks - 1) * BK + o_v)
    for turn in gl.static_range(1, STAGES):
        request(p_k, o_k, s_k, turn, blocks, BK * D, STAGES)
        async_copy.commit_group()
        if turn < STAGES - 1:
            request(p_v, o_v, s_v, turn, blocks, BK, STAGES)
    KIND: gl.constexpr = gl.int32 if q8.dtype.element_ty == gl.int8 else gl.float32
    b_f = gl.load(q_scale + i_bh * n_q + i_q * BQ + gl.arange(0, BQ, ROW))
    scale = gl.load(p_scale + blocks - 1)
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    b_s = gl.zeros([BQ, BK], KIND, SCORES)
    b_s = warpgroup_mma(s_q, s_k.index(0).permute((1, 0)), b_s, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    b_max = gl.full([BQ], float("-inf"), gl.float32, ROW)
    left = keys - (blocks - 1) * BK
    b_next, b_max = probabilities(b_s, b_f, b_max, scale, left, True, EXP, OPERAND)
    b_decay = gl.full([BQ], 0.0, gl.float32, ROW)
    b_before = b_decay
    b_p = gl.zeros_like(b_next)
    b_o = warpgroup_mma_init(gl.zeros([BQ, D], gl.float32, OUT))
    b_n = warpgroup_mma_init(gl.zeros([BQ, 8], gl.float32, ONE))
    b_out = gl.zeros([BQ, D], gl.float32, OUT)
    b_sum = half(gl.zeros([BQ, 8], gl.float32, ONE))
    # A turn starts the products of the probabilities of the turn before with their values, and
    # computes its own. It begins with the end of the products started in the turn before: ptxas
    # moves instructions over a wait, but not from one turn to the next.
    for turn in range(1, blocks):
        b_o, b_n, b_p = warpgroup_mma_wait(0, deps=[b_o, b_n, b_p])
        b_p = swapped(b_next)
        b_8 = operand(b_p, OPERAND)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        request(p_k, o_k, s_k, turn + STAGES - 1, blocks, BK * D, STAGES)
        request(p_v, o_v, s_v, turn + STAGES - 2, blocks, BK, STAGES)
        async_copy.commit_group()
        b_s = gl.zeros([BQ, BK], KIND, SCORES)
        s_kt = s_k.index(turn % STAGES).permute((1, 0))
        b_s = warpgroup_mma(s_q, s_kt, b_s, use_acc=False, is_async=True)
        b_out, b_sum = add_values(b_out, b_sum, b_o, b_n, b_before, OUT)
        b_n = gl.zeros([BQ, 8], gl.float32, ONE)
        b_n = warpgroup_mma(b_8, s_one.permute((1, 0)), b_n, use_acc=False, is_async=True)
        b_o = gl.zeros([BQ, D], gl.float32, OUT)
        s_vt = s_v.index((turn - 1) % STAGES).permute((1, 0))
        b_o = warpgroup_mma(b_8, s_vt, b_o, use_acc=False, is_async=True)
        scale = gl.load(p_scale + turn - 1)
        b_s = warpgroup_mma_wait(2, deps=[b_s])
        b_next, b_new = probabilities(b_s, b_f, b_max, scale, BK, False, EXP, OPERAND)
        b_before = b_decay
        b_decay = gl.exp2(b_max - b_new)
        b_max = b_new
    async_copy.wait_group(0)
    fence_async_shared()
    b_o, b_n, b_p = warpgroup_mma_wait(0, deps=[b_o, b_n, b_p])
    b_out, b_sum = add_values(b_out, b_sum, b_o, b_n, b_before, OUT)
    b_8 = operand(swapped(b_next), OPERAND)
    b_n = warpgroup_mma(b_8, s_one.permute((1, 0)), b_n, use_acc=False, is_async=True)
    s_vt = s_v.index((blocks - 1) % STAGES).permute((1, 0))
    b_o = warpgroup_mma(b_8, s_vt, b_o, use_acc=False, is_async=True)
    b_o, b_n = warpgroup_mma_wait(0, deps=[b_o, b_n])
    b_out, b_sum = add_values(b_out, b_sum, b_o, b_n, b_decay, OUT)
    b_total = gl.convert_layout(gl.max(b_sum, 1), gl.SliceLayout(1, OUT))
    o_c = gl.arange(0, D, gl.SliceLayout(0, OUT))
    b_v = gl.load(v_scale + i_bh * D + o_c)
    b_out = b_out / b_total[:, None] * b_v[None, :]
    o_r = i_q * BQ + gl.arange(0, BQ, gl.SliceLayout(1, OUT))
    p_out = out + i_bh // heads * out_b + i_bh % heads * out_h
    p_out += o_r.to(gl.int64)[:, None] * out_s + o_c[None, :]
    gl.store(p_out, b_out.to(out.dtype.element_ty), mask=(o_r < queries)[:, None])


PROBABILITIES = {"line": LINE.value, "both": BOTH.value, "exp2": EXP2.value}
