// y = x W^T for a few rows x: every weight is read once, and multiplied with all rows while it
// is in registers. A warp makes OUTS outputs of each row; with SPLIT > 1 that many warps share them.
#pragma once
#include "ops/glu/cuda.cuh"

namespace kernelwright {

struct FewRowsArgs {
  const void *x, *weight, *bias, *scale;
  void* y;
  unsigned n, k;  // outputs of a row, and its width
};

struct Eight { unsigned char bits; };  // e4m3
struct Integer { signed char v; };
template <class W> constexpr bool SCALED = sizeof(W) == 1;  // each output has a scale

// 16 bytes of a weight, which no other warp reads: they stay out of the L1 cache, which has x
__device__ __forceinline__ uint4 passing(const void* p) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#else
  return *(const uint4*)p;
#endif
}

// elements of four words in float32
template <class W> struct Widened {
  static __device__ __forceinline__ void word(unsigned w, float* out) {
    out[0] = of_pair<W>(w, 0);
    out[1] = of_pair<W>(w, 1);
  }
};
template <> struct Widened<Eight> {
  static __device__ __forceinline__ void word(unsigned w, float* out) {
#ifdef __CUDA_ARCH__
    // needs capability 8.9, which the planner checks
    unsigned low, high;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"((unsigned short)w));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"((unsigned short)(w >> 16)));
    Widened<half>::word(low, out);
    Widened<half>::word(high, out + 2);
#else
    for (int i = 0; i < 4; i++) {
      const unsigned b = w >> 8 * i & 255, magnitude = b & 127;
      const int e = magnitude >> 3;
      const float m = e ? 1.f + (magnitude & 7) / 8.f : (magnitude & 7) / 8.f;
      const float v = magnitude == 127 ? NAN : ldexpf(m, (e ? e : 1) - 7);
      out[i] = b & 128 ? -v : v;
    }
#endif
  }
};
template <> struct Widened<Integer> {
  static __device__ __forceinline__ void word(unsigned w, float* out) {
    // the float 2^23 + (v + 128) has the byte v + 128 for its last bits: no conversion is needed
    const unsigned biased = w ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[i] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7540 + i)) - 8388736.f;
    }
  }
};
template <class W, int COUNT> __device__ __forceinline__ void widened(const uint4& v, float* out) {
  Widened<W>::word(v.x, out);
  Widened<W>::word(v.y, out + COUNT);
  Widened<W>::word(v.z, out + 2 * COUNT);
  Widened<W>::word(v.w, out + 3 * COUNT);
}

// AHEAD: loads of each output that are under way at once
template <class X, class W, int ROWS, int OUTS, int AHEAD, int SPLIT, bool GLU>
__device__ __forceinline__ void few_rows(const FewRowsArgs& a) {
  constexpr int V = 16 / sizeof(W), WARPS = 4, EACH = GLU ? OUTS / 2 : OUTS, SUMS = ROWS * OUTS;
  constexpr unsigned STEP = SPLIT * 32 * V;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % SPLIT;
  const unsigned first = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * EACH;
  const W* weight[OUTS];
#pragma unroll
  for (int o = 0; o < OUTS; o++) {
    // outputs beyond the last one are computed as the last, and not stored
    const unsigned n = min(first + o % EACH, a.n - 1) + (o >= EACH ? a.n : 0);
    weight[o] = (const W*)a.weight + (i64)n * a.k;
  }
  float sum[SUMS] = {};
  for (unsigned from = (part * 32 + lane) * V; from < a.k; from += AHEAD * STEP) {
    uint4 held[AHEAD][OUTS];
#pragma unroll
    for (int d = 0; d < AHEAD; d++)
      if (from + d * STEP < a.k)
#pragma unroll
        for (int o = 0; o < OUTS; o++) held[d][o] = passing(weight[o] + from + d * STEP);
#pragma unroll
    for (int d = 0; d < AHEAD; d++) {
      const unsigned k = from + d * STEP;
      if (k >= a.k) break;
      float w[OUTS][V];
#pragma unroll
      for (int o = 0; o < OUTS; o++) widened<W, V / 4>(held[d][o], w[o]);
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        const X* row = (const X*)a.x + (i64)m * a.k + k;
        float x[V];
#pragma unroll
        for (int i = 0; i < V / 8; i++) widened<X, 2>(((const uint4*)row)[i], x + 8 * i);
#pragma unroll
        for (int o = 0; o < OUTS; o++)
#pragma unroll
          for (int i = 0; i < V; i++) sum[m * OUTS + o] += x[i] * w[o][i];
      }
    }
  }
  // the sums of all lanes and of the warps that share these outputs, in each of their threads
  __shared__ float shared[WARPS * SUMS];
  row_sums<SPLIT * 32, SUMS>(sum, shared);
  if (part || lane) return;
#pragma unroll
  for (int m = 0; m < ROWS; m++)
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const unsigned n = first + e;
      if (n >= a.n) continue;
      float y = sum[m * OUTS + e];
      if constexpr (SCALED<W>) y *= ((const float*)a.scale)[n];
      if constexpr (GLU) {
        float up = sum[m * OUTS + EACH + e];
        if constexpr (SCALED<W>) up *= ((const float*)a.scale)[a.n + n];
        y = Silu<false>::of(y) * up;
      } else if (a.bias) {
        y += widen(((const X*)a.bias)[n]);
      }
      ((X*)a.y)[(i64)m * a.n + n] = narrow<X>(y);
    }
}

}  // namespace kernelwright
