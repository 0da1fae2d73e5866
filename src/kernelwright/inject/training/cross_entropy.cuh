// Cross-entropy of 16-bit logits without a float32 copy of them, with the bits of
// F.cross_entropy(logits.float(), target): its log_softmax adds up each row in the order that is
// repeated here (PyTorch's kernel for rows that fit in no shared memory), one block a row.
#pragma once
#include "backends/over_block.cuh"

namespace kernelwright {

struct CrossEntropyArgs {
  const void* logits;
  const i64* target;
  float* top;         // of each row: its largest logit,
  float* log_sum;     // the logarithm of the sum of exp(logit - top),
  float* log_prob;    // the log-probability of its target, 0 if that is ignored
  const float* gradient;  // of log_prob; null in the forward
  void* d_logits;
  i64 step;  // elements from one row to the next
  i64 ignored;
  unsigned classes;
};

constexpr int ROW_THREADS = 1024, ROW_VECTOR = 4;  // those of PyTorch's kernel: they decide the order

template <class T, int N> struct alignas(N * sizeof(T)) Elements { T at[N]; };

// Vectors as long as whole rounds of the block last, then single elements.
template <class T, class F> __device__ __forceinline__ float fold_row(const T* x, unsigned classes, float v, F step) {
  const unsigned whole = classes - classes % (ROW_THREADS * ROW_VECTOR);
#pragma unroll 4
  for (unsigned i = threadIdx.x * ROW_VECTOR; i < whole; i += ROW_THREADS * ROW_VECTOR) {
    const auto held = *reinterpret_cast<const Elements<T, ROW_VECTOR>*>(x + i);
#pragma unroll
    for (int j = 0; j < ROW_VECTOR; ++j) v = step(v, widen(held.at[j]));
  }
  for (unsigned i = whole + threadIdx.x; i < classes; i += ROW_THREADS) v = step(v, widen(x[i]));
  return v;
}

template <class T> __device__ __forceinline__ void cross_entropy(const CrossEntropyArgs& a) {
  const T* x = static_cast<const T*>(a.logits) + blockIdx.x * a.step;
  const float lowest = -3.402823466e+38f;
  float top = fold_row(x, a.classes, lowest, [](float m, float v) { return fmaxf(m, v); });
  top = over_block(top, [](float m, float v) { return m < v ? v : m; });
  float sum = fold_row(x, a.classes, 0.f, [=](float s, float v) { return s + expf(v - top); });
  sum = over_block(sum, [](float s, float v) { return s + v; });
  if (threadIdx.x) return;
  const float log_sum = logf(sum);
  const i64 target = a.target[blockIdx.x];
  const bool used = target != a.ignored;
  if (used && (target < 0 || target >= a.classes)) __trap();  // as PyTorch's kernel ends
  a.top[blockIdx.x] = top;
  a.log_sum[blockIdx.x] = log_sum;
  a.log_prob[blockIdx.x] = used ? widen(x[target]) - top - log_sum : 0.f;
}

// V: elements of an access.
template <class T, int V> __device__ __forceinline__ void cross_entropy_backward(const CrossEntropyArgs& a) {
  const i64 row = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row * a.step;
  T* d_x = static_cast<T*>(a.d_logits) + row * a.classes;
  const float top = a.top[row], log_sum = a.log_sum[row], gradient = a.gradient[row];
  // all but one of the row's gradients are zeros, whose sum with it has no order
  const float sum = 0.f + gradient;
  const i64 target = a.target[row] == a.ignored ? -1 : a.target[row];
  for (unsigned i = threadIdx.x * V; i < a.classes; i += blockDim.x * V) {
    auto held = *reinterpret_cast<const Elements<T, V>*>(x + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float p = expf(widen(held.at[j]) - top - log_sum);
      held.at[j] = narrow<T>(__fmaf_rn(-p, sum, i + j == target ? gradient : 0.f));
    }
    *reinterpret_cast<Elements<T, V>*>(d_x + i) = held;
  }
}

}  // namespace kernelwright
