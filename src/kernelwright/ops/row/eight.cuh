// Quantises rows to fp8 (e4m3) with one scale each: the largest element of a row becomes the largest
// fp8 value.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

constexpr float EIGHT_LARGEST = 448.f;

// The maximum over the THREADS neighbouring threads of a row, in each of them. `shared` has a float
// for each warp of the block.
template <int THREADS> __device__ __forceinline__ float row_largest(float v, float* shared) {
#pragma unroll
  for (int o = smaller(THREADS, 32) / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  if constexpr (THREADS > 32) {
    constexpr int WARPS = THREADS / 32;
    const int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
    if (threadIdx.x % 32 == 0) shared[warp] = v;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) v = fmaxf(v, shared[first + w]);
  }
  return v;
}

// Quantisation scale and its inverse.
struct EightScale {
  float in, out;
  __device__ __forceinline__ explicit EightScale(float largest) {
    if (largest == 0.f) largest = EIGHT_LARGEST;
    in = __fmul_rn(__frcp_rn(largest), EIGHT_LARGEST);
    out = __fmul_rn(largest, 1.f / EIGHT_LARGEST);
  }
};

// needs capability 8.9, which the planner checks
__device__ __forceinline__ unsigned short eight_pair(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Stores V neighbouring elements value(i), at a multiple of V bytes.
template <int V, class Value> __device__ __forceinline__ void store_eight(unsigned char* p, Value value) {
  if constexpr (V == 1) {
    *p = (unsigned char)eight_pair(value(0), 0.f);
  } else {
    struct alignas(V) { unsigned short pair[V / 2]; } packed;
#pragma unroll
    for (int i = 0; i < V; i += 2) packed.pair[i / 2] = eight_pair(value(i), value(i + 1));
    write_whole(reinterpret_cast<decltype(packed)*>(p), packed);
  }
}

// Stores a row, whose threads hold its elements value(k, i), and its scale. All threads of the block
// must call it; those of rows past the end are not `live`. `shared` has a float for each warp.
template <class S, class Value>
__device__ __forceinline__ void write_eight(Value value, bool live, unsigned char* y, float* scale, float* shared) {
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k))
#pragma unroll
      for (int i = 0; i < S::V; i++) largest = fmaxf(largest, fabsf(value(k, i)));
  const EightScale by(row_largest<S::THREADS>(largest, shared));
  if (!live) return;
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k))
      store_eight<S::V>(y + S::vector(k) * S::V, [&](int i) { return value(k, i) * by.in; });
  if (S::thread() == 0) *scale = by.out;
}

}  // namespace kernelwright
