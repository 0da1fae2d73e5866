// RMSNorm and rotary embedding of query and key in one launch; either part may be absent.
//
//   n = rmsnorm(x) * weight
//   interleaved:  (a, b) = (n[2j], n[2j+1])        half:  (a, b) = (n[j], n[j + D/2])
//   y = (a cos - b sin, b cos + a sin)
//
// A row is a head, or all heads of a token when the norm runs across them; its rotation repeats
// every D elements. Blocks past the query's work on the key.
#pragma once
#include "ops/row/norms.cuh"

namespace kernelwright {

struct RopeArgs {
  const void *query, *key, *q_weight, *k_weight, *cos, *sin;
  void *q_out, *k_out;
  Place at_query, at_key, at_q_cos, at_k_cos, at_q_sin, at_k_sin, at_q_out, at_k_out;
  Rows q_rows, k_rows;
  unsigned q_blocks;
  float eps, q_factor, k_factor;
};

enum Layout { INTERLEAVED, HALF, UNROTATED };

template <int N_, int V_, int THREADS_> struct RopeShape : Spread<N_, V_, THREADS_> {
  static constexpr int N = N_, V = V_, THREADS = THREADS_;
};

// C: dtype of the tables. D: what the rotation repeats over. A: elements that alignment lets move
// at once. HALF_TABLE: tables hold D/2 columns. Turn: how the rotation rounds.
template <class X, class W, class C, class S, int A, int BLOCK, int DIMS, int D, int LAYOUT, bool HALF_TABLE,
          bool WEIGHTED, class Norm, class Round, class Turn>
__device__ __forceinline__ void rope(const RopeArgs& a) {
  constexpr int K = S::K, V = S::V, ROWS = BLOCK / S::THREADS;
  static_assert(LAYOUT != INTERLEAVED || V % 2 == 0);
  static_assert(LAYOUT != HALF || (D / 2) % V == 0);
  __shared__ float shared[Scratch<Norm, BLOCK>::FLOATS];
  __shared__ float exchange[LAYOUT == HALF ? ROWS : 1][LAYOUT == HALF ? S::N : 1];

  const bool second = blockIdx.x >= a.q_blocks;
  const Rows& rows = second ? a.k_rows : a.q_rows;
  const int slot = threadIdx.x / S::THREADS;
  const i64 number = (i64)(blockIdx.x - (second ? a.q_blocks : 0)) * ROWS + slot;
  const bool live = number < rows.count;
  const RowIndex<DIMS> at(live ? number : rows.count - 1, rows);
  const X* x = (const X*)(second ? a.key : a.query) + at.offset(second ? a.at_key : a.at_query);
  const W* weight = (const W*)(second ? a.k_weight : a.q_weight);
  const C* cos = (const C*)a.cos + at.offset(second ? a.at_k_cos : a.at_q_cos);
  const C* sin = (const C*)a.sin + at.offset(second ? a.at_k_sin : a.at_q_sin);
  X* y = (X*)(second ? a.k_out : a.q_out) + at.offset(second ? a.at_k_out : a.at_q_out);

  Vec<X, V, A> held[K];
#pragma unroll
  for (int k = 0; k < K; k++)
    if (S::inside(k)) held[k].load(x + S::vector(k) * V);

  Norm norm;
  norm.template measure<S>([&](int k, int i) { return held[k].get(i); }, a.eps, second ? a.k_factor : a.q_factor,
                           shared);
  auto normed = [&](int k, int i, const Vec<W, V, A>& w) {
    return norm.template apply<Round>(held[k].get(i), WEIGHTED, WEIGHTED ? w.get(i) : 1.f, false, 0.f);
  };

  if constexpr (LAYOUT == HALF) {  // partners sit in other threads
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) {
        const int c = S::vector(k) * V;
        Vec<W, V, A> w;
        if constexpr (WEIGHTED) w.load(weight + c);
#pragma unroll
        for (int i = 0; i < V; i++) exchange[slot][c + i] = normed(k, i, w);
      }
    if constexpr (S::THREADS > 32) __syncthreads(); else __syncwarp();
  }
  if (!live) return;
#pragma unroll
  for (int k = 0; k < K; k++)
    if (S::inside(k)) {
      const int c = S::vector(k) * V, j = c % D;
      Vec<X, V, A> o;
      Vec<W, V, A> w;
      if constexpr (WEIGHTED && LAYOUT != HALF) w.load(weight + c);
      if constexpr (LAYOUT == UNROTATED) {
#pragma unroll
        for (int i = 0; i < V; i++) o.set(i, normed(k, i, w));
      } else if constexpr (LAYOUT == INTERLEAVED) {
        constexpr int T = HALF_TABLE ? V / 2 : V, STEP = HALF_TABLE ? 1 : 2, NEXT = HALF_TABLE ? 0 : 1;
        Vec<C, T, A> co, si;
        co.load(cos + j * T / V);
        si.load(sin + j * T / V);
#pragma unroll
        for (int p = 0; p < V / 2; p++) {
          const float e = normed(k, 2 * p, w), f = normed(k, 2 * p + 1, w);
          o.set(2 * p, Turn::add(Turn::mul(e, co.get(STEP * p)), Turn::mul(-f, si.get(STEP * p))));
          o.set(2 * p + 1, Turn::add(Turn::mul(f, co.get(STEP * p + NEXT)), Turn::mul(e, si.get(STEP * p + NEXT))));
        }
      } else {
        const bool front = j < D / 2;
        const int column = HALF_TABLE && !front ? j - D / 2 : j, partner = front ? c + D / 2 : c - D / 2;
        Vec<C, V, A> co, si;
        co.load(cos + column);
        si.load(sin + column);
#pragma unroll
        for (int i = 0; i < V; i++) {
          const float own = exchange[slot][c + i], other = exchange[slot][partner + i];
          o.set(i, Turn::add(Turn::mul(own, co.get(i)), Turn::mul(front ? -other : other, si.get(i))));
        }
      }
      o.store(y + c);
    }
}

}  // namespace kernelwright
