// RMSNorm and rotary embedding of query and key in one launch; either part may be absent.
//
//   n = rmsnorm(x) * weight
//   interleaved:  (a, b) = (n[2j], n[2j+1])        half:  (a, b) = (n[j], n[j + D/2])
//   y = (a cos - b sin, b cos + a sin)
//
// A row is a head, or all heads of a token when the norm runs across them; its rotation repeats
// every D elements. A thread group takes EACH heads of a token, which share its table. Blocks of
// query and key alternate in the ratio of their rows, so that both find a token's table in the cache.
#pragma once
#include "ops/row/norms.cuh"

namespace kernelwright {

struct RopeArgs {
  const void *query, *key, *q_weight, *k_weight, *cos, *sin;
  void *q_out, *k_out;
  Place at_query, at_key, at_q_cos, at_k_cos, at_q_sin, at_k_sin, at_q_out, at_k_out;
  Rows q_rows, k_rows;
  unsigned q_blocks, q_share;  // q_share query blocks per key block; 0: all query blocks first
  float eps, q_factor, k_factor;
};

enum Layout { INTERLEAVED, HALF, UNROTATED };

// The other operands of a thread: weights, and the table columns of its vector.
template <class W, class C, int V, int A, int LAYOUT, bool HALF_TABLE, bool WEIGHTED> struct RopeOperands {
  static constexpr int T = LAYOUT == INTERLEAVED && HALF_TABLE ? V / 2 : V;
  Vec<W, V, A> weight;
  Vec<C, T, A> cos, sin;
  // element i's column of the table
  static __device__ __forceinline__ constexpr int column(int i) { return T == V ? i : i / 2; }
  __device__ __forceinline__ void load(const W* w, const C* co, const C* si, int c, int D) {
    if constexpr (WEIGHTED) weight.load(w + c);
    if constexpr (LAYOUT != UNROTATED) {
      int j = c % D;
      if constexpr (HALF_TABLE) j = LAYOUT == INTERLEAVED ? j / 2 : j % (D / 2);
      cos.load(co + j);
      sin.load(si + j);
    }
  }
  static constexpr int BYTES = (WEIGHTED ? V * sizeof(W) : 0) + (LAYOUT == UNROTATED ? 0 : 2 * T * sizeof(C));
};

// Which rows a block takes: the number of its first group, among those of query or of key.
struct RopeBlock {
  bool second;
  unsigned block;
  __device__ __forceinline__ RopeBlock(const RopeArgs& a)
      : second(blockIdx.x >= a.q_blocks), block(second ? blockIdx.x - a.q_blocks : blockIdx.x) {
    if (!a.q_share) return;
    const unsigned group = blockIdx.x / (a.q_share + 1), member = blockIdx.x % (a.q_share + 1);
    second = member == a.q_share;
    block = second ? group : group * a.q_share + member;
  }
};

struct Unmoved {
  __device__ __forceinline__ i64 operator()() const { return 0; }
};

// C: dtype of the tables. D: the rotation repeats every D elements. A: elements per access that the
// alignment allows. HALF_TABLE: tables hold D/2 columns. Turn: how the rotation rounds. moved: by how
// many elements the output of this block is moved; called by all its threads, after their loads.
template <class X, class W, class C, class S, int A, int BLOCK, int EACH, int DIMS, int D, int LAYOUT,
          bool HALF_TABLE, bool WEIGHTED, class Norm, class Round, class Turn, class Moved = Unmoved>
__device__ __forceinline__ void rope(const RopeArgs& a, Moved moved = {}) {
  constexpr int K = S::K, V = S::V, GROUPS = BLOCK / S::THREADS;
  static_assert(LAYOUT != INTERLEAVED || V % 2 == 0);
  static_assert(LAYOUT != HALF || (D / 2) % V == 0);
  // a head within one thread group exchanges halves by shuffles, others through shared memory
  constexpr bool SHUFFLED = LAYOUT == HALF && K == 1 && S::N == D && S::FULL && S::THREADS <= 32;
  constexpr bool EXCHANGED = LAYOUT == HALF && !SHUFFLED;
  // several rows at a time only if they need no shared memory
  static_assert(EACH == 1 || (S::THREADS <= 32 && !EXCHANGED));
  __shared__ float shared[Scratch<Norm, S, BLOCK>::FLOATS];
  __shared__ float exchange[EXCHANGED ? GROUPS : 1][EXCHANGED ? S::N : 1];

  const RopeBlock which(a);
  const bool second = which.second;
  const Rows& rows = second ? a.k_rows : a.q_rows;
  const int group = threadIdx.x / S::THREADS;
  const i64 number = ((i64)which.block * GROUPS + group) * EACH;
  const bool live = number < rows.count;
  const RowIndex<DIMS> at(live ? number : rows.count - EACH, rows);
  const Place at_x = second ? a.at_key : a.at_query, at_y = second ? a.at_k_out : a.at_q_out;
  const X* x = (const X*)(second ? a.key : a.query) + at.offset(at_x);
  const W* weight = (const W*)(second ? a.k_weight : a.q_weight);
  const C* cos = (const C*)a.cos + at.offset(second ? a.at_k_cos : a.at_q_cos);
  const C* sin = (const C*)a.sin + at.offset(second ? a.at_k_sin : a.at_q_sin);
  X* y = (X*)(second ? a.k_out : a.q_out) + at.offset(at_y);

  using Operands = RopeOperands<W, C, V, A, LAYOUT, HALF_TABLE, WEIGHTED>;
  constexpr bool EARLY = K * Operands::BYTES <= 320;
  Vec<X, V, A> held[EACH][K];
  Operands early[EARLY ? K : 1];
#pragma unroll
  for (int e = 0; e < EACH; e++)
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) held[e][k].load(x + e * at_x.inner + S::vector(k) * V);
  if constexpr (EARLY) {
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) early[k].load(weight, cos, sin, S::vector(k) * V, D);
  }
  auto operands = [&](int k) {
    if constexpr (EARLY) return early[k];
    Operands late;
    late.load(weight, cos, sin, S::vector(k) * V, D);
    return late;
  };

  Norm norm[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++)
    norm[e].template measure<S>([&](int k, int i) { return held[e][k].get(i); }, a.eps,
                                second ? a.k_factor : a.q_factor, shared);
  y += moved();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    auto normed = [&](int k, int i, const Operands& with) {
      const float w = WEIGHTED ? with.weight.get(i) : 1.f;
      return norm[e].template apply<Round>(held[e][k].get(i), WEIGHTED, w, false, 0.f);
    };
    if constexpr (EXCHANGED) {
#pragma unroll
      for (int k = 0; k < K; k++)
        if (S::inside(k)) {
          const Operands with = operands(k);
#pragma unroll
          for (int i = 0; i < V; i++) exchange[group][S::vector(k) * V + i] = normed(k, i, with);
        }
      if constexpr (S::THREADS > 32) __syncthreads(); else __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) {
        const int c = S::vector(k) * V;
        const Operands with = operands(k);
        Vec<X, V, A> o;
        if constexpr (LAYOUT == UNROTATED) {
          o.fill([&](int i) { return normed(k, i, with); });
        } else if constexpr (LAYOUT == INTERLEAVED) {
#pragma unroll
          for (int i = 0; i < V; i += 2) {
            const int ci = Operands::column(i), cj = Operands::column(i + 1);
            const float l = normed(k, i, with), r = normed(k, i + 1, with);
            o.set(i, Turn::add(Turn::mul(l, with.cos.get(ci)), Turn::mul(-r, with.sin.get(ci))),
                  Turn::add(Turn::mul(r, with.cos.get(cj)), Turn::mul(l, with.sin.get(cj))));
          }
        } else {
          const bool front = c % D < D / 2;
          const int partner = front ? c + D / 2 : c - D / 2;
          o.fill([&](int i) {
            float own, other;
            if constexpr (SHUFFLED) {
              own = normed(k, i, with);
              other = __shfl_xor_sync(~0u, own, S::THREADS / 2);
            } else {
              own = exchange[group][c + i];
              other = exchange[group][partner + i];
            }
            return Turn::add(Turn::mul(own, with.cos.get(i)), Turn::mul(front ? -other : other, with.sin.get(i)));
          });
        }
        if (live) o.store(y + e * at_y.inner + c);
      }
  }
}

}  // namespace kernelwright
