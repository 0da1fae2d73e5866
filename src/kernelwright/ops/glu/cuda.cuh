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

// erff is part of CUDA's mathematical library, which has changed it: PyTorch has that of the CUDA it
// was built with, a kernel that of its own compiler. Where they differ, one of these is written out.
struct CompilersErf {
  static __device__ __forceinline__ float of(float a) { return erff(a); }
};

// A polynomial in a * a up to a border; from there on 1 - 2^p of another polynomial in |a|. The
// coefficients, highest power first, are `near` and `far`.
struct ErfTerms { float border, far[7], near[7]; };

// one of two numbers without a branch: the compiler would make two branches of a polynomial each
__device__ __forceinline__ float pick(bool first, float a, float b) {
  float one;
  asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %2, %3, p; }"
      : "=f"(one) : "r"(unsigned(first)), "f"(a), "f"(b));
  return one;
}

template <class Library> struct WrittenErf {
  static __device__ __forceinline__ float of(float a) {
    constexpr ErfTerms T = Library::TERMS;
    const bool outside = fabsf(a) >= T.border;
    const float t = pick(outside, fabsf(a), __fmul_rn(a, a));
    float p = pick(outside, T.far[0], T.near[0]);
#pragma unroll
    for (int i = 1; i < 7; i++) p = __fmaf_rn(p, t, pick(outside, T.far[i], T.near[i]));
    const float inner = __fmaf_rn(p, a, a);
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-fabsf(inner)));
    return pick(outside, copysignf(1.f - power, a), inner);
  }
};

// of CUDA 13.0 and 13.1: PyTorch's builds for CUDA 13.0
struct Cuda130 {
  static constexpr ErfTerms TERMS = {
      1.00296f,
      {0.000112198715f, -0.0013275252f, 0.008396535f, -0.040246584f, 0.15950431f, 0.9129177f, 0.62906003f},
      {8.4834945e-05f, -0.00082130916f, 0.005213489f, -0.026868774f, 0.11284005f, -0.37612665f, 0.12837915f}};
};
// from CUDA 13.2 on: PyTorch 2.15's build for CUDA 13.2
struct Cuda132 {
  static constexpr ErfTerms TERMS = {
      1.0037584f,
      {6.784818e-05f, -0.0009299388f, 0.006954225f, -0.037528004f, 0.15668742f, 0.9144432f, 0.6287219f},
      {6.74986e-05f, -0.00076476467f, 0.005143017f, -0.026827244f, 0.112828694f, -0.37612557f, 0.12837917f}};
};

template <bool FAST, class Erf = CompilersErf> struct GeluErf {
  static __device__ __forceinline__ float odd(float x) {
    constexpr float ALPHA = 0.70710678118654752440;
    return Erf::of(x * ALPHA);
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
