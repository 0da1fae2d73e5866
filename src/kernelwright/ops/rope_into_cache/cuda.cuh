// RoPE of query and key, with their norms where they have any, and the write of key and value into a
// cache of fixed size, in one launch:
//
//   keys[:, :, length + t] = rope(key)[:, t]     values[:, :, length + t] = value[:, t]     length += T
//
// Blocks of key and value read the length, and one of them adds to it, which it may do only after all
// others have read. So they read it by adding to its upper bits, where they count themselves: the last
// one to come finds that all others were there, and stores the new length.
#pragma once
#include "ops/rope/cuda.cuh"

namespace kernelwright {

struct IntoCacheArgs {
  const void* value;
  void* values;
  unsigned long long* length;
  RopeArgs rope;  // its k_out are the first positions of the cache
  Place at_value, at_values;
  i64 key_step, value_step;  // elements from one position of a cache to the next
  Rows v_rows;
  unsigned rope_blocks;  // blocks of query and key, before those of value
  unsigned writers;      // blocks of key and value
  unsigned tokens, room;  // positions that are written, and those of the cache
};

constexpr int COUNT_AT = 40;  // a length has the bits below, the blocks that have read it those above

// WIDTH: of a row of value. V: elements of an access to it. All others are those of `rope`.
template <int WIDTH, int V, class X, class W, class C, class S, int A, int BLOCK, int EACH, int DIMS, int D,
          int LAYOUT, bool HALF_TABLE, bool WEIGHTED, class Norm, class Round, class Turn>
__device__ __forceinline__ void rope_into_cache(const IntoCacheArgs& a) {
  __shared__ i64 first;  // the first position to be written
  const bool of_value = blockIdx.x >= a.rope_blocks;
  const bool writes = of_value || RopeBlock(a.rope).second;
  unsigned long long read = 0;
  if (writes && threadIdx.x == 0) read = atomicAdd(a.length, 1ull << COUNT_AT);
  // after the loads of a block, which need not wait for the length
  auto position = [&]() -> i64 {
    if (!writes) return 0;
    if (threadIdx.x == 0) {
      first = read & ((1ull << COUNT_AT) - 1);
      // as index_copy_ ends: no row is written outside of the cache, and no result is used
      if (first + a.tokens > a.room) __trap();
      if (read >> COUNT_AT == a.writers - 1) *a.length = first + a.tokens;
    }
    __syncthreads();
    return first;
  };
  if (!of_value) {
    rope<X, W, C, S, A, BLOCK, EACH, DIMS, D, LAYOUT, HALF_TABLE, WEIGHTED, Norm, Round, Turn>(
        a.rope, [&] { return position() * a.key_step; });
    return;
  }
  constexpr unsigned VECTORS = WIDTH / V;
  const unsigned number = (blockIdx.x - a.rope_blocks) * BLOCK + threadIdx.x, row = number / VECTORS;
  const bool live = row < a.v_rows.count;
  const RowIndex<3> at(live ? row : 0, a.v_rows);
  const unsigned column = number % VECTORS * V;
  Vec<X, V> held;
  held.load((const X*)a.value + at.offset(a.at_value) + column);
  X* y = (X*)a.values + position() * a.value_step + at.offset(a.at_values) + column;
  if (live) held.store(y);
}

}  // namespace kernelwright
