// GELU: y = 0.5 x (1 + f(x)), where f is odd: erf(x / sqrt(2)), or its tanh approximation.
#pragma once
#include "ops/glu/cuda.cuh"

namespace kernelwright {

struct GeluArgs {
  const void* x;
  void* y;
  Place at_x, at_y;
  Rows rows;
};

// One vector per thread, computed without a table. N: width of a row.
template <class X, int N, int V, int BLOCK, int DIMS, class Act>
__device__ __forceinline__ void gelu(const GeluArgs& args) {
  constexpr unsigned VECTORS = N / V;
  const i64 number = (i64)blockIdx.x * BLOCK + threadIdx.x;
  const i64 row = number / VECTORS;
  if (row >= args.rows.count) return;
  const int c = int(number % VECTORS) * V;
  const RowIndex<DIMS> at(row, args.rows);
  Vec<X, V> v;
  v.load((const X*)args.x + at.offset(args.at_x) + c);
  v.fill([&](int i) { return Act::of(v.get(i)); });
  v.store((X*)args.y + at.offset(args.at_y) + c);
}

// f / 2 by look-up, for bfloat16. Of its 2^15 magnitudes only those from 2^-9 to 8 need an entry:
// below, |f(x)| is under half a unit of the last place, so y rounds to x / 2 as it does with f = 0;
// above, f is 1. A block computes all entries in less time than its first vectors take to arrive.
template <class Act> struct Halves {
  static constexpr unsigned BELOW = 0x3aff, LAST = 0x4100, SIZE = LAST - BELOW + 1;
  float entry[SIZE];

  __device__ __forceinline__ void fill(int thread, int threads) {
    for (unsigned i = thread; i < SIZE; i += threads)
      entry[i] = i ? 0.5f * Act::odd(__uint_as_float((BELOW + i) << 16)) : 0.f;
  }
  // y before rounding; NaN takes the first entry and stays NaN in the multiplication
  __device__ __forceinline__ float of(float x) const {
    const float near = fminf(fmaxf(fabsf(x), __uint_as_float(BELOW << 16)), __uint_as_float(LAST << 16));
    // an offset in bytes: the low 16 bits of `near` are zero, so one shift is enough
    const unsigned bytes = (__float_as_uint(near) >> 14) - BELOW * sizeof(float);
    const float half_f = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(entry) + bytes);
    return x * (0.5f + copysignf(half_f, x));
  }
  __device__ __forceinline__ unsigned of_pair(unsigned two) const {
    return pair<bfloat16>(of(__uint_as_float(two << 16)), of(__uint_as_float(two & 0xffff0000u)));
  }
};

// As many blocks as the GPU holds at once loop over all vectors of eight; a thread loads AHEAD of
// them before it looks up the first. Fewer than 2^31 vectors.
template <class X, int N, int BLOCK, int AHEAD, int DIMS, class Act>
__device__ __forceinline__ void gelu_table(const GeluArgs& args) {
  static_assert(same<X, bfloat16>, "float16 has too many magnitudes for a table");
  constexpr unsigned V = 8, VECTORS = N / V;
  __shared__ Halves<Act> table;
  const unsigned vectors = args.rows.count * VECTORS, apart = gridDim.x * BLOCK;
  const auto offset = [&](unsigned n, const Place& place) {
    const unsigned row = n / VECTORS;
    return RowIndex<DIMS>(row, args.rows).offset(place) + (n - row * VECTORS) * V;
  };
  uint4 v[AHEAD];
  const auto load = [&](unsigned first) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      if (const unsigned n = first + k * apart; n < vectors)
        v[k] = *reinterpret_cast<const uint4*>((const X*)args.x + offset(n, args.at_x));
  };
  unsigned first = blockIdx.x * BLOCK + threadIdx.x;
  load(first);
  table.fill(threadIdx.x, BLOCK);
  __syncthreads();
  for (; first < vectors; first += AHEAD * apart, load(first)) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      if (const unsigned n = first + k * apart; n < vectors) {
        const uint4 y = {table.of_pair(v[k].x), table.of_pair(v[k].y), table.of_pair(v[k].z),
                         table.of_pair(v[k].w)};
        *reinterpret_cast<uint4*>((X*)args.y + offset(n, args.at_y)) = y;
      }
  }
}

}  // namespace kernelwright
