// Gated linear unit: y = act(a) * b, for two tensors or for the two halves of one.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

struct GluArgs {
  const void* a;
  const void* b;
  void* y;
  Place at_a, at_b, at_y;
  Rows rows;
};

// x / (1 + exp(-z)); FAST is within two ulp of float32 for every z that matters to a 16-bit result,
// otherwise it is PyTorch's computation
template <bool FAST> __device__ __forceinline__ float logistic(float x, float z) {
  return FAST ? __fdividef(x, 1.f + __expf(-z)) : x / (1.f + expf(-z));
}

__device__ __forceinline__ float inverse(float v) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#else
  return 1.f / v;
#endif
}

// logistic<false> for x and z of 16 bits: its bits once they are rounded to 16, without the branches
// of a division. One correction leaves less than a unit of float32's last place, and no 16-bit x is
// so near to a tie, also if the inverse is off by two units (tried for all x; the GPU tests compare
// all x as well). Both operands are a quarter, so that the inverse of the larger one stays normal; of
// an infinite x a float is taken that rounds to infinity. A divisor of infinity gives zero; of a tiny
// x, whose remainder would vanish, it is 2.
__device__ __forceinline__ float logistic_of_16_bits(float x, float z) {
  constexpr float LARGEST = 3.4e38f, TINY = 8.6736174e-19f;
  const float divisor = 1.f + expf(-z), a = 0.25f * (x > LARGEST ? LARGEST : x), b = 0.25f * divisor;
  const float r = inverse(b), q = __fmul_rn(a, r);
  const bool endless = divisor > 3.4028234e38f;
  const float special = x * (endless ? 0.f : 0.5f);
  return endless || fabsf(x) < TINY ? special : __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
}

template <bool FAST> struct Silu {
  static __device__ __forceinline__ float of(float x) { return logistic<FAST>(x, x); }
};

// GELU is 0.5 x (1 + odd(x)). FAST computes 0.5 x (1 + tanh(u)) as x / (1 + exp(-2u)), without the
// cancellation; otherwise it is PyTorch's computation.
template <bool FAST> struct GeluTanh {
  static __device__ __forceinline__ float inner(float x) {
    constexpr float BETA = 1.41421356237309504880 * 1.12837916709551257390 * 0.5, KAPPA = 0.044715;
    const float cube = x * x * x;
    return BETA * (x + KAPPA * cube);
  }
  static __device__ __forceinline__ float odd(float x) { return tanhf(inner(x)); }
  static __device__ __forceinline__ float of(float x) {
    if constexpr (FAST) return logistic<FAST>(x, 2.f * inner(x));
    return 0.5f * x * (1.f + odd(x));
  }
};

template <bool FAST> struct GeluErf {
  static __device__ __forceinline__ float odd(float x) {
    constexpr float ALPHA = 0.70710678118654752440;
    return erff(x * ALPHA);
  }
  static __device__ __forceinline__ float of(float x) { return x * 0.5f * (1.f + odd(x)); }
};

// H: width of a row of a, b and y. A, B: offsets of a and b in the rows of their tensors.
template <class X, int H, int V, int BLOCK, int DIMS, int A, int B, class Act, class Round>
__device__ __forceinline__ void glu(const GluArgs& args) {
  constexpr unsigned VECTORS = H / V;
  const i64 number = (i64)blockIdx.x * BLOCK + threadIdx.x;
  const i64 row = number / VECTORS;
  if (row >= args.rows.count) return;
  const int c = int(number % VECTORS) * V;
  const RowIndex<DIMS> at(row, args.rows);
  Vec<X, V> a, b, o;
  a.load((const X*)args.a + at.offset(args.at_a) + A + c);
  b.load((const X*)args.b + at.offset(args.at_b) + B + c);
  o.fill([&](int i) { return Round::mul(Round::keep(Act::of(a.get(i))), b.get(i)); });
  o.store((X*)args.y + at.offset(args.at_y) + c);
}

}  // namespace kernelwright
