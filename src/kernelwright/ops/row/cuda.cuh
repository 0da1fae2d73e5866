// The row kernel: residual, norm, modulation and gate in one pass over a row.
//
//   s = residual + gate * x        stored to `sum`, rounded to the dtype of x
//   n = norm(s) * weight + bias
//   y = (n * (1 + scale) + shift) * out_gate
//
// Absent parts are compiled out. Arithmetic is in float32; `Round` says where to round, `Norm` in
// which order to sum.
#pragma once
#include "ops/row/eight.cuh"
#include "ops/row/norms.cuh"

namespace kernelwright {

enum Parts : unsigned {
  RESIDUAL = 1, GATE = 2, WEIGHT = 4, BIAS = 8, SCALE = 16, SHIFT = 32, OUT_GATE = 64, NORMED = 128,
  EIGHT = 256  // also store the result in fp8, unless `eight` is null
};

struct RowArgs {
  const void *x, *residual, *gate, *weight, *bias, *scale, *shift, *out_gate;
  void *y, *sum, *eight, *eight_scale;
  Place at_x, at_residual, at_gate, at_scale, at_shift, at_out_gate, at_y, at_sum;
  Rows rows;
  float eps, factor;
};

// The other operands of a thread: one vector of each part that is present.
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
};

// X, W, M: dtypes of the row, of weight and bias, of scale, shift and gates. All loads are issued
// before the first sum, so that they overlap each other and the reduction.
template <class X, class W, class M, class S, int BLOCK, int DIMS, unsigned PARTS, class Norm, class Round>
__device__ __forceinline__ void row(const RowArgs& a) {
  constexpr int K = S::K, V = S::V;
  using Operands = Beside<W, M, V, PARTS>;
  // rows that do not fit the registers are read again from the cache
  constexpr bool HELD = K * V * sizeof(X) <= 512;
  constexpr bool EARLY = HELD && (PARTS & NORMED) && K * Operands::BYTES <= 192;
  constexpr bool ADDED_EARLY = HELD && K * V * (sizeof(X) + sizeof(M)) <= 192;
  __shared__ float shared[Scratch<Norm, S, BLOCK>::FLOATS];

  static_assert(HELD || !(PARTS & EIGHT));
  __shared__ float largest_of_warp[divide_up(BLOCK, 32)];

  const i64 number = (i64)blockIdx.x * (BLOCK / S::THREADS) + threadIdx.x / S::THREADS;
  const bool live = number < a.rows.count;
  const RowIndex<DIMS> at(live ? number : a.rows.count - 1, a.rows);
  const X* x = (const X*)a.x + at.offset(a.at_x);
  X* sum = (X*)a.sum + at.offset(a.at_sum);

  Vec<X, V> held[HELD ? K : 1];
  if constexpr (HELD) {
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) held[k].load(x + S::vector(k) * V);
  }
  Operands early[EARLY ? K : 1];
  if constexpr (EARLY) {
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) early[k].load(a, at, S::vector(k) * V);
  }

  if constexpr (PARTS & RESIDUAL) {
    struct Added { Vec<X, V> residual; Vec<M, V> gate; };
    auto fetch = [&](int k) {
      Added from;
      from.residual.load((const X*)a.residual + at.offset(a.at_residual) + S::vector(k) * V);
      if constexpr (PARTS & GATE) from.gate.load((const M*)a.gate + at.offset(a.at_gate) + S::vector(k) * V);
      return from;
    };
    Added added[ADDED_EARLY ? K : 1];
    if constexpr (ADDED_EARLY) {
#pragma unroll
      for (int k = 0; k < K; k++)
        if (S::inside(k)) added[k] = fetch(k);
    }
#pragma unroll
    for (int k = 0; k < K; k++)
      if (S::inside(k)) {
        Vec<X, V> v;
        if constexpr (HELD) v = held[k]; else v.load(x + S::vector(k) * V);
        const Added with = ADDED_EARLY ? added[ADDED_EARLY ? k : 0] : fetch(k);
        v.fill([&](int i) {
          float t = v.get(i);
          if constexpr (PARTS & GATE) t = Round::template product<X, M>(with.gate.get(i), t);
          return Round::add(with.residual.get(i), t);
        });
        if constexpr (HELD) {
          if (live) v.store_whole(sum + S::vector(k) * V);
          held[k] = v;
        } else if (live) {
          v.store(sum + S::vector(k) * V);  // and read again below
        }
      }
  }
  // a run-time condition: the same code with and without fp8, so the rows have the same bits
  auto in_eight_bits = [&] {
    if (!a.eight) return;
    write_eight<S>([&](int k, int i) { return held[k].get(i); }, live,
                   (unsigned char*)a.eight + number * S::N, (float*)a.eight_scale + number, largest_of_warp);
  };
  if constexpr (!(PARTS & NORMED)) {
    if constexpr (PARTS & EIGHT) in_eight_bits();
    return;
  }

  auto element = [&](int k) {
    if constexpr (HELD) return held[k];
    Vec<X, V> v;
    if (live || !(PARTS & RESIDUAL)) v.load((PARTS & RESIDUAL ? (const X*)sum : x) + S::vector(k) * V);
    return v;
  };
  Norm norm;
  norm.template measure<S>([&](int k, int i) { return element(k).get(i); }, a.eps, a.factor, shared);
  if (!live && !(PARTS & EIGHT)) return;
#pragma unroll
  for (int k = 0; k < K; k++)
    if (S::inside(k)) {
      const int c = S::vector(k) * V;
      const Vec<X, V> v = element(k);
      Vec<X, V> o;
      Operands with;
      if constexpr (EARLY) with = early[k]; else with.load(a, at, c);
      o.fill([&](int i) {
        float f = norm.template apply<Round>(v.get(i), PARTS & WEIGHT, PARTS & WEIGHT ? with.weight.get(i) : 1.f,
                                             PARTS & BIAS, PARTS & BIAS ? with.bias.get(i) : 0.f);
        if constexpr (PARTS & SCALE) f = Round::mul(f, Round::template one_plus<M>(with.scale.get(i)));
        if constexpr (PARTS & SHIFT) f = Round::add(f, with.shift.get(i));
        if constexpr (PARTS & OUT_GATE) f = Round::mul(f, with.out_gate.get(i));
        return f;
      });
      if (live) o.store_whole((X*)a.y + at.offset(a.at_y) + c);
      if constexpr (PARTS & EIGHT) held[k] = o;
    }
  if constexpr (PARTS & EIGHT) in_eight_bits();
}

}  // namespace kernelwright
