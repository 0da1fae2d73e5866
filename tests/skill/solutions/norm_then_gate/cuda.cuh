// norm_then_gate: y = x / sqrt(mean(x^2) + eps) * weight * SiLU(gate), over a row
#pragma once
#include "ops/glu/cuda.cuh"
#include "ops/row/norms.cuh"

namespace kernelwright {

// pointers first, then what cuda.py packs by its `layout`, in this order
struct NormThenGateArgs {
  const void *x, *gate, *weight;
  void* y;
  Place at_x, at_gate, at_weight, at_y;
  Rows rows;
  float eps, factor;
};

// X, W: dtypes of the rows and of the weight. S: how a row is spread over its threads. Norm: sums
// in its order, FreeRms or at::mean's. FAST: exp and division by the fast unit.
template <class X, class W, class S, int BLOCK, int DIMS, bool WEIGHTED, bool FAST, class Norm, class Round>
__device__ __forceinline__ void norm_then_gate_kernel(const NormThenGateArgs& args) {
  __shared__ float shared[Scratch<Norm, S, BLOCK>::FLOATS];
  const i64 number = (i64)blockIdx.x * (BLOCK / S::THREADS) + threadIdx.x / S::THREADS;
  // threads past the last row read it again: a sum needs all threads of its warp
  const bool live = number < args.rows.count;
  const RowIndex<DIMS> at(live ? number : args.rows.count - 1, args.rows);
  const X* x = (const X*)args.x + at.offset(args.at_x);
  const X* gate = (const X*)args.gate + at.offset(args.at_gate);
  const W* weight = (const W*)args.weight + at.offset(args.at_weight);
  Vec<X, S::V> held[S::K], by[S::K];
  Vec<W, S::V> scale[WEIGHTED ? S::K : 1];
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k)) {
      held[k].load(x + S::vector(k) * S::V);
      by[k].load(gate + S::vector(k) * S::V);
      if constexpr (WEIGHTED) scale[k].load(weight + S::vector(k) * S::V);
    }

  Norm norm;
  norm.template measure<S>([&](int k, int i) { return held[k].get(i); }, args.eps, args.factor, shared);

  if (!live) return;
#pragma unroll
  for (int k = 0; k < S::K; k++)
    if (S::inside(k)) {
      Vec<X, S::V> y;
      y.fill([&](int i) {
        const float w = WEIGHTED ? scale[WEIGHTED ? k : 0].get(i) : 0.f, g = by[k].get(i);
        // eager gates in float32 and rounds at the end, as the store does
        return norm.template apply<Round>(held[k].get(i), WEIGHTED, w, false, 0.f) * logistic<FAST>(g, g);
      });
      y.store((X*)args.y + at.offset(args.at_y) + S::vector(k) * S::V);
    }
}

}  // namespace kernelwright
