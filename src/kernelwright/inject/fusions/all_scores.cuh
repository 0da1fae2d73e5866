// What PyTorch's attention does between its two GEMMs where it keeps all scores in memory: adds the
// mask, softmax, and zeros for a row that sees no key. One block a row, in place, with the order of
// PyTorch's softmax for rows of 1025 to 9216 numbers: 1024 threads with every 1024th number each,
// whose sums meet in trees. Here a thread does the work of four neighbours: it reads and writes four
// numbers at once, and rows wait less for each other.
#pragma once
#include "backends/common.cuh"

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

// Four neighbours of a mask that begin at a multiple of four elements.
template <class M> struct FourOfMask {
  Vec<M, 4> of;
  __device__ __forceinline__ void load(const M* p) { of.load(p); }
  __device__ __forceinline__ float added(int j) const { return of.get(j); }
};
template <> struct FourOfMask<bool> {
  unsigned of;
  __device__ __forceinline__ void load(const bool* p) { of = *reinterpret_cast<const unsigned*>(p); }
  __device__ __forceinline__ float added(int j) const { return of >> 8 * j & 255u ? 0.f : unseen(); }
};

// Values of the 1024 threads of PyTorch's kernel, combined in its order: a tree in each of their 32
// warps, of which eight threads here have one, then a tree of the warps. `shared` has 32 floats that
// nothing else uses.
template <class F> __device__ __forceinline__ float over_row(float (&v)[4], float* shared, F combine) {
#pragma unroll
  for (int step = 4; step; step /= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = combine(v[j], __shfl_down_sync(~0u, v[j], step));
  const float warp = combine(combine(v[0], v[2]), combine(v[1], v[3]));
  if (threadIdx.x % 8 == 0) shared[threadIdx.x / 8] = warp;
  __syncthreads();
  float all = shared[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step; step /= 2) all = combine(all, __shfl_down_sync(~0u, all, step));
  return __shfl_sync(~0u, all, 0);
}

// x / y, correctly rounded, for `inverse` = 1 / y, y from 1 to 2^14 and x from 0 to 1: a product and
// two corrections by the remainder. For tiny x the remainder would underflow, so these are divided.
__device__ __forceinline__ float divided(float x, float y, float inverse) {
  if (x > 0.f && x < 0x1p-96f) return __fdiv_rn(x, y);
  float q = __fmul_rn(x, inverse);
  q = __fmaf_rn(__fmaf_rn(-q, y, x), inverse, q);
  return __fmaf_rn(__fmaf_rn(-q, y, x), inverse, q);
}

// M: the type of the mask. PER: numbers of a row for each thread of PyTorch's. WHOLE: rows of scores
// and mask begin at multiples of four elements, and have a multiple of four elements.
template <class M, int PER, bool WHOLE> __device__ __forceinline__ void probabilities(const AllScoresArgs& a) {
  __shared__ float of_top[32], of_sum[32], of_hidden[32];
  const i64 row = blockIdx.x;
  const i64 query = row % a.queries, head = row / a.queries % a.heads, sample = row / a.queries / a.heads;
  float* x = a.scores + row * a.keys;
  const M* mask =
      static_cast<const M*>(a.mask) + sample * a.mask_batch + head * a.mask_head + query * a.mask_row;
  const unsigned first = threadIdx.x * 4;
  auto inside = [&](int r, int j) { return first + r * SOFTMAX_THREADS + (WHOLE ? 0 : j) < a.keys; };

  float v[PER][4], top[4] = {LOWEST, LOWEST, LOWEST, LOWEST}, sum[4] = {};
#pragma unroll
  for (int r = 0; r < PER; ++r) {
    const unsigned i = first + r * SOFTMAX_THREADS;
    if constexpr (WHOLE) {
      if (!inside(r, 0)) continue;
      Vec<float, 4> scores;
      FourOfMask<M> numbers;
      scores.load(x + i);
      numbers.load(mask + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[r][j] = scores.get(j) + numbers.added(j);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (inside(r, j)) v[r][j] = x[i + j] + added(mask[i + j]);
    }
  }
#pragma unroll
  for (int r = 0; r < PER; ++r)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (inside(r, j)) top[j] = fmaxf(top[j], v[r][j]);
  const float largest = over_row(top, of_top, [](float m, float n) { return m < n ? n : m; });
  bool hidden = false;
  if (largest == LOWEST) {  // perhaps the row sees no key
    float all[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int r = 0; r < PER; ++r)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (inside(r, j) && !(v[r][j] == unseen())) all[j] = 0.f;
    hidden = over_row(all, of_hidden, [](float s, float t) { return fminf(s, t); }) == 1.f;
  }
#pragma unroll
  for (int r = 0; r < PER; ++r)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (inside(r, j)) sum[j] += v[r][j] = expf(v[r][j] - largest);
  const float total = over_row(sum, of_sum, [](float s, float t) { return s + t; });
  const float inverse = __frcp_rn(total);
#pragma unroll
  for (int r = 0; r < PER; ++r) {
    const unsigned i = first + r * SOFTMAX_THREADS;
    auto probability = [&](int j) { return hidden ? 0.f : divided(v[r][j], total, inverse); };
    if constexpr (WHOLE) {
      if (!inside(r, 0)) continue;
      Vec<float, 4> result;
      result.fill(probability);
      result.store_whole(x + i);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (inside(r, j)) x[i + j] = probability(j);
    }
  }
}

}  // namespace kernelwright
