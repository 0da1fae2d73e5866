"""Functions for Triton kernels that are as accurate in float32 as PyTorch's.

A GPU computes exp(u) as 2^(u log2 e), and rounding u log2 e costs about |u| / 2 ulps: exp(-80) is
off by some 40. That shows in float32 results and never in 16-bit ones.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(b_u):
    """exp(u) within about two ulps: 2^n exp(u - n ln 2), and n ln 2 is subtracted in two parts."""
    b_c = tl.minimum(tl.maximum(b_u, -104.0), 89.0)  # beyond these it is 0 or infinity
    b_n = tl.floor(b_c * 1.4426950408889634 + 0.5)
    # the first part of ln 2 has 12 bits, so its product with n is exact
    b_r = (b_c - b_n * 0.693359375) + b_n * 2.12194440e-4
    # 2^n in two factors: 2^128 is infinite, and exp(88.7) is not
    b_half = tl.floor(b_n * 0.5)
    b_y = tl.exp2(b_r * 1.4426950408889634) * tl.exp2(b_half) * tl.exp2(b_n - b_half)
    return tl.where(b_u == b_u, b_y, b_u)  # the limits drop a NaN


@triton.jit
def sigmoid(b_u):
    """1 / (1 + exp(-u)), the division rounded correctly."""
    b_e = exp(-tl.abs(b_u))
    b_y = tl.div_rn(1.0 + 0.0 * b_e, 1.0 + b_e)
    return tl.where(b_u >= 0.0, b_y, tl.where(b_u == b_u, b_e * b_y, b_u))


@triton.jit
def tanh(b_u):
    """tanh(u): a polynomial below 0.6, where 1 - 2t / (1 + t) with t = exp(-2|u|) cancels."""
    b_z = b_u * b_u
    b_p = -0.00840731623 + b_z * 0.00237205864
    b_p = -0.0539609327 + b_z * (0.0217858579 + b_z * b_p)
    b_p = -0.333333331 + b_z * (0.133333075 + b_z * b_p)
    b_t = exp(-2.0 * tl.abs(b_u))
    b_far = 1.0 - tl.div_rn(2.0 * b_t, 1.0 + b_t)
    b_far = tl.where(b_u < 0.0, -b_far, b_far)
    return tl.where(b_z < 0.36, b_u + b_u * b_z * b_p, b_far)
