// The row kernel: residual, norm, modulation and gate in one pass over a row.
//
//   s = residual + gate * x        written to `sum`, rounded to the dtype of x
//   n = norm(s) * weight + bias
//   y = (n * (1 + scale) + shift) * out_gate
//
// Parts that are absent are compiled out. fp32 inside; `Round` says where to round, `Norm` in which
// order to sum.
#pragma once
#include "ops/row/norms.cuh"

namespace kernelwright {

enum Parts : unsigned {
  RESIDUAL = 1, GATE = 2, WEIGHT = 4, BIAS = 8, SCALE = 16, SHIFT = 32, OUT_GATE = 64, NORMED = 128
};

struct RowArgs {
  const void *x, *residual, *gate, *weight, *bias, *scale, *shift, *out_gate;
  void *y, *sum;
  Place at_x, at_residual, at_gate, at_scale, at_shift, at_out_gate, at_y, at_sum;
  Rows rows;
  float eps, factor;
};

// What a thread reads beside its row: one vector of each part that is there.
template <class W, class M, int V, unsigned PARTS> struct Beside {
  Vec<W, V> weight, bias;
  Vec<M, V> scale, shift, out_gate;
  static constexpr int BYTES = V * (int(bool(PARTS & WEIGHT)) + int(bool(PARTS & BIAS))) * sizeof(W) +
      V * (int(bool(PARTS & SCALE)) + int(bool(PARTS & SHIFT)) + int(bool(PARTS & OUT_GATE))) * sizeof(M);

  template <class At> __device__ __forceinline__ void load(const RowArgs& a, const At& at, int c) {
    if constexpr (PARTS & WEIGHT) weight.load((const W*)a.weight + c);
    if constexpr (PARTS & BIAS) bias.load((const W*)a.bias + c);
    if constexpr (PARTS & SCALE) scale.load((const M*)a.scale + at.offset(a.at_scale) + c);
    if constexpr (PARTS & SHIFT) shift.load((const M*)a.shift + at.offset(a.at_shift) + c);
    if constexpr (PARTS & OUT_GATE) out_gate.load((const M*)a.out_gate + at.offset(a.at_out_gate) + c);
  }
  // whether two rows read the same of it
  template <class At> static __device__ __forceinline__ bool shared(const RowArgs& a, const At& p, const At& q) {
    return (!(PARTS & SCALE) || p.offset(a.at_scale) == q.offset(a.at_scale)) &&
           (!(PARTS & SHIFT) || p.offset(a.at_shift) == q.offset(a.at_shift)) &&
           (!(PARTS & OUT_GATE) || p.offset(a.at_out_gate) == q.offset(a.at_out_gate));
  }
};

// X, W, M: dtypes of the row, of weight and bias, of scale, shift and gates. A thread group takes R
// neighbouring rows, which mostly share what stands beside them. All loads are issued before the
// first sum, so that they run under each other and under the reduction.
template <class X, class W, class M, class S, int R, int BLOCK, int DIMS, unsigned PARTS, class Norm, class Round>
__device__ __forceinline__ void row(const RowArgs& a) {
  constexpr int K = S::K, V = S::V, GROUPS = BLOCK / S::THREADS;
  using At = RowIndex<DIMS>;
  using Operands = Beside<W, M, V, PARTS>;
  // rows too long for registers are read again from the cache, one at a time
  constexpr bool HELD = K * V * sizeof(X) <= 512;
  constexpr bool EARLY = HELD && K * Operands::BYTES <= 192;
  constexpr bool ADDED_EARLY = HELD && K * V * (sizeof(X) + sizeof(M)) <= 192;
  static_assert(HELD || R == 1);
  constexpr int SCRATCH = Scratch<Norm, S, BLOCK>::FLOATS;
  __shared__ float shared[R * SCRATCH];

  const i64 first = ((i64)blockIdx.x * GROUPS + threadIdx.x / S::THREADS) * R;
  auto number = [&](int r) { return first + r; };
  auto live = [&](int r) { return number(r) < a.rows.count; };
  auto at = [&](int r) { return At(live(r) ? number(r) : a.rows.count - 1, a.rows); };

  Vec<X, V> held[R][HELD ? K : 1];
  if constexpr (HELD) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int k = 0; k < K; k++)
        if (S::inside(k)) held[r][k].load((const X*)a.x + at(r).offset(a.at_x) + S::vector(k) * V);
  }
  Operands early[EARLY ? K : 1];
  if constexpr (EARLY && (PARTS & NORMED)) {
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) early[k].load(a, at(0), S::vector(k) * V);
  }

  if constexpr (PARTS & RESIDUAL) {
    Vec<X, V> residual[ADDED_EARLY ? R : 1][ADDED_EARLY ? K : 1];
    Vec<M, V> gate[ADDED_EARLY ? R : 1][ADDED_EARLY ? K : 1];
    auto fetch = [&](int r, int k, Vec<X, V>& to, Vec<M, V>& by) {
      to.load((const X*)a.residual + at(r).offset(a.at_residual) + S::vector(k) * V);
      if constexpr (PARTS & GATE) by.load((const M*)a.gate + at(r).offset(a.at_gate) + S::vector(k) * V);
    };
    if constexpr (ADDED_EARLY) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int k = 0; k < K; k++)
          if (S::inside(k)) fetch(r, k, residual[r][k], gate[r][k]);
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int k = 0; k < K; k++)
        if (S::inside(k)) {
          Vec<X, V> v, to;
          Vec<M, V> by;
          if constexpr (HELD) v = held[r][k];
          else v.load((const X*)a.x + at(r).offset(a.at_x) + S::vector(k) * V);
          if constexpr (ADDED_EARLY) { to = residual[r][k]; by = gate[r][k]; } else fetch(r, k, to, by);
#pragma unroll
          for (int i = 0; i < V; i++) {
            float t = v.get(i);
            if constexpr (PARTS & GATE) t = Round::template product<X, M>(by.get(i), t);
            v.set(i, Round::add(to.get(i), t));
          }
          if (live(r)) v.store((X*)a.sum + at(r).offset(a.at_sum) + S::vector(k) * V);
          if constexpr (HELD) held[r][k] = v;
        }
  }
  if constexpr (!(PARTS & NORMED)) return;

  auto element = [&](int r, int k) {
    if constexpr (HELD) return held[r][k];
    Vec<X, V> v;
    const bool summed = PARTS & RESIDUAL;
    if (live(r) || !summed)
      v.load((const X*)(summed ? a.sum : a.x) + at(r).offset(summed ? a.at_sum : a.at_x) + S::vector(k) * V);
    return v;
  };
  Norm norm[R];
#pragma unroll
  for (int r = 0; r < R; r++)
    norm[r].template measure<S>([&](int k, int i) { return element(r, k).get(i); }, a.eps, a.factor,
                                shared + r * SCRATCH);
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (!live(r)) return;
    const bool reuse = EARLY && (r == 0 || Operands::shared(a, at(0), at(r)));
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) {
        const int c = S::vector(k) * V;
        const Vec<X, V> v = element(r, k);
        Vec<X, V> o;
        Operands with;
        if (reuse) with = early[EARLY ? k : 0]; else with.load(a, at(r), c);
#pragma unroll
        for (int i = 0; i < V; i++) {
          float f = norm[r].template apply<Round>(v.get(i), PARTS & WEIGHT, PARTS & WEIGHT ? with.weight.get(i) : 1.f,
                                                  PARTS & BIAS, PARTS & BIAS ? with.bias.get(i) : 0.f);
          if constexpr (PARTS & SCALE) f = Round::mul(f, Round::template one_plus<M>(with.scale.get(i)));
          if constexpr (PARTS & SHIFT) f = Round::add(f, with.shift.get(i));
          if constexpr (PARTS & OUT_GATE) f = Round::mul(f, with.out_gate.get(i));
          o.set(i, f);
        }
        o.store((X*)a.y + at(r).offset(a.at_y) + c);
      }
  }
}

}  // namespace kernelwright
