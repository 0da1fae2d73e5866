// Quantises the concatenation [left, act(x) * up] to fp8, with one scale per row.
#pragma once
#include "ops/glu/cuda.cuh"
#include "ops/row/eight.cuh"

namespace kernelwright {

struct EightArgs {
  const void *x, *up, *left;
  void *y, *scale;
  Place at_x, at_up, at_left, at_y;
  Rows rows;
};

struct Unchanged {
  static __device__ __forceinline__ float of(float x) { return x; }
};

// The tanh of the special function unit has an error of up to 2^-11, fp8 one of 2^-4. It takes half
// the time of exponential and division.
__device__ __forceinline__ float near_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct NearSilu {
  static __device__ __forceinline__ float of(float x) {
    const float half = 0.5f * x;
    return half + half * near_tanh(half);
  }
};

struct NearGeluTanh {
  static __device__ __forceinline__ float of(float x) {
    const float half = 0.5f * x;
    return half + half * near_tanh(GeluTanh<true>::inner(x));
  }
};

// N, LEFT: widths of x and of left. THREADS share a row and hold all of it in registers.
template <class X, int N, int LEFT, int V, int THREADS, int BLOCK, int DIMS, bool GATED, class Act>
__device__ __forceinline__ void eight(const EightArgs& a) {
  using S = Spread<LEFT + N, V, THREADS>;
  __shared__ float shared[divide_up(BLOCK, 32)];
  const i64 number = (i64)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
  const bool live = number < a.rows.count;
  const RowIndex<DIMS> at(live ? number : a.rows.count - 1, a.rows);
  const X* x = (const X*)a.x + at.offset(a.at_x) - LEFT;
  const X* up = (const X*)a.up + at.offset(a.at_up) - LEFT;
  const X* left = (const X*)a.left + at.offset(a.at_left);

  Vec<X, V> held[S::K], gate[GATED ? S::K : 1];
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k)) {
      const int c = S::vector(k) * V;
      held[k].load((LEFT && c < LEFT ? left : x) + c);
      if constexpr (GATED)
        if (!LEFT || c >= LEFT) gate[k].load(up + c);
    }
  float value[S::K][V];
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k)) {
      const bool plain = LEFT && S::vector(k) * V < LEFT;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float v = held[k].get(i);
        float f = Act::of(v);
        if constexpr (GATED) f *= gate[k].get(i);
        value[k][i] = plain ? v : f;
      }
    }
  write_eight<S>([&](int k, int i) { return value[k][i]; }, live, (unsigned char*)a.y + at.offset(a.at_y),
                 (float*)a.scale + number, shared);
}

}  // namespace kernelwright
