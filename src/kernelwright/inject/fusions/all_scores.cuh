// What PyTorch's attention does between its two GEMMs where it keeps all scores in memory: adds the
// mask, softmax, and zeros for a row that sees no key. One block a row, in place, with the order of
// PyTorch's softmax for rows of 2049 to 9216 numbers, which it keeps in registers too.
#pragma once
#include "backends/over_block.cuh"

namespace kernelwright {

struct AllScoresArgs {
  float* scores;     // [batch, heads, queries, keys]; on return the probabilities
  const void* mask;  // truth values, or numbers that are added
  i64 mask_batch, mask_head, mask_row;  // elements from one of its rows to the next; 0: the same
  unsigned heads, queries, keys;
};

constexpr unsigned SOFTMAX_THREADS = 1024;  // those of PyTorch's kernel: they decide the order

constexpr float LOWEST = -3.402823466e+38f;
// minus infinity, by overflow: NVRTC has no INFINITY
__device__ __forceinline__ float unseen() { return 2.f * LOWEST; }

__device__ __forceinline__ float added(bool seen) { return seen ? 0.f : unseen(); }
template <class T> __device__ __forceinline__ float added(T number) { return widen(number); }

// M: the type of the mask. PER: numbers of a row for each thread, 1024 apart.
template <class M, int PER> __device__ __forceinline__ void probabilities(const AllScoresArgs& a) {
  const i64 row = blockIdx.x;
  const i64 query = row % a.queries, head = row / a.queries % a.heads, sample = row / a.queries / a.heads;
  float* x = a.scores + row * a.keys;
  const M* mask =
      static_cast<const M*>(a.mask) + sample * a.mask_batch + head * a.mask_head + query * a.mask_row;
  float v[PER], top = LOWEST, sum = 0.f, hidden = 1.f;
#pragma unroll
  for (int r = 0; r < PER; ++r) {
    const unsigned i = threadIdx.x + r * SOFTMAX_THREADS;
    if (i >= a.keys) continue;
    v[r] = x[i] + added(mask[i]);
    top = fmaxf(top, v[r]);
    if (!(v[r] == unseen())) hidden = 0.f;
  }
  top = over_block(top, [](float m, float n) { return m < n ? n : m; });
#pragma unroll
  for (int r = 0; r < PER; ++r)
    if (threadIdx.x + r * SOFTMAX_THREADS < a.keys) sum += expf(v[r] - top);
  sum = over_block(sum, [](float s, float t) { return s + t; });
  if (top == LOWEST) hidden = over_block(hidden, [](float s, float t) { return fminf(s, t); });
  else hidden = 0.f;
#pragma unroll
  for (int r = 0; r < PER; ++r) {
    const unsigned i = threadIdx.x + r * SOFTMAX_THREADS;
    if (i < a.keys) x[i] = hidden == 1.f ? 0.f : expf(v[r] - top) / sum;
  }
}

}  // namespace kernelwright
