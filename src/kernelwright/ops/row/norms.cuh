// Ways to normalise a row, by the order in which the row is summed.
//
// Each has `measure`, which reduces the row that a thread group holds, and `apply`, which normalises
// one element. Free orders are ours; the others repeat PyTorch's kernels step by step. Which of them
// has the bits of the installed PyTorch is found by comparison: calibration/.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

// Floats of shared memory that a norm needs in a block.
template <class Norm, class S, int BLOCK> struct Scratch { static constexpr int FLOATS = 96; };

struct NoNorm {
  template <class S, class Get> __device__ void measure(Get, float, float, float*) {}
  template <class R> __device__ float apply(float x, bool, float, bool, float) const { return x; }
};

// the sum of a row in free order
struct FreeSum {
  template <class S, class Term> static __device__ float of(Term term, float* shared) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) total += term(k, i);
    return row_sum<S::THREADS>(total, shared);
  }
};

// rms in free order: float32 fma, one accumulator per vector lane
struct FreeRms {
  float scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float, float* shared) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) { float v = x(k, i); total = fmaf(v, v, total); }
    total = row_sum<S::THREADS>(total, shared);
    scale = rsqrtf(total * (1.f / S::N) + eps);
  }
  template <class R> __device__ float apply(float x, bool weighted, float w, bool, float) const {
    float y = x * scale;
    return weighted ? y * w : y;
  }
};

// layer norm in free order, from the deviations of a first mean. They sum to the rounding error of
// that mean; subtracting it makes rows around 10,000, also constant ones, as accurate as F.layer_norm.
struct FreeLayer {
  float mean, error, scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float, float* shared) {
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) total += x(k, i);
    mean = row_sum<S::THREADS>(total, shared) * (1.f / S::N);
    float rest[2] = {0.f, 0.f};  // of the deviations and of their squares
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) {
          float d = x(k, i) - mean;
          rest[0] += d;
          rest[1] = fmaf(d, d, rest[1]);
        }
    row_sums<S::THREADS, 2>(rest, shared + 32);
    error = rest[0] * (1.f / S::N);
    scale = rsqrtf(rest[1] * (1.f / S::N) - error * error + eps);
  }
  template <class R> __device__ float apply(float x, bool weighted, float w, bool biased, float b) const {
    float y = ((x - mean) - error) * scale;
    if (weighted) y *= w;
    return biased ? y + b : y;
  }
};

// A head of 128 has 32 vectors of four, one for each lane of a warp in PyTorch's kernels. Here a
// thread may hold two of them: lanes 2t and 2t + 1 of the tree, which are added last.
template <class S> struct Paired { static constexpr bool VALUE = S::V == 8 && S::K == 1; };

template <class S> __device__ __forceinline__ float paired_sum(float (&part)[2]) {
  static_assert(S::FULL && S::THREADS <= 16);
#pragma unroll
  for (int o = S::THREADS / 2; o > 0; o /= 2) {
    part[0] += __shfl_xor_sync(~0u, part[0], o);
    part[1] += __shfl_xor_sync(~0u, part[1], o);
  }
  return part[0] + part[1];
}

// The sum of a row in at::mean's order. WIDTH is the width of its block: 32 from 16 rows on, more
// below; its thread l takes the 4-vectors l, l + WIDTH, ... into four accumulators, one a vector lane
// (for rows under 128, which at::mean does not vectorise, one a stride). `term(k, i)` is rounded before
// it is added.
template <int WIDTH> struct MeanSum {
  template <class S, class Term> static __device__ float of(Term term, float* shared) {
    float total;
    if constexpr (Paired<S>::VALUE && S::N == 64) {
      total = head_of_64<S>(term);
    } else if constexpr (Paired<S>::VALUE) {
      float part[2];
#pragma unroll
      for (int q = 0; q < 2; q++)
        part[q] = ((term(0, 4 * q) + term(0, 4 * q + 1)) + term(0, 4 * q + 2)) + term(0, 4 * q + 3);
      total = paired_sum<S>(part);
    } else {
      if constexpr (S::THREADS == WIDTH) total = alone<S>(term, shared);
      else total = together<S>(term, shared);
#pragma unroll
      for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    }
    return total;
  }

  // At::mean's lane l of 32 has the elements l and l + 32; here thread t of 8 has those from 8t on.
  // What meets first lies 4, 2 and 1 threads apart: of a thread's eight sums it keeps half each time
  // and gives the other half away, so that thread t ends with that of the lanes t, t + 8, ...
  template <class S, class Term> static __device__ float head_of_64(Term term) {
    static_assert(S::THREADS == 8 && WIDTH == 32);
    float part[8];
#pragma unroll
    for (int i = 0; i < 8; i++) part[i] = term(0, i);
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
      const bool upper = threadIdx.x & half;
#pragma unroll
      for (int i = 0; i < half; i++) {
        const float kept = upper ? part[i + half] : part[i], given = upper ? part[i] : part[i + half];
        part[i] = kept + __shfl_xor_sync(~0u, given, half);
      }
    }
    float total = part[0];
#pragma unroll
    for (int o = 4; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    return total;
  }

  // as many threads as at::mean has
  template <class S, class Term> static __device__ float alone(Term term, float* shared) {
    static_assert(S::V == 4 || (S::V == 1 && S::K <= 4));
    float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) {
          float& p = part[S::V == 4 ? i : k % 4];
          p = __fadd_rn(p, term(k, i));
        }
    float total = ((part[0] + part[1]) + part[2]) + part[3];
    if constexpr (WIDTH > 32) {  // halve across warps first, as block_x_reduce does
      const int t = S::thread();
      float* row = shared + (threadIdx.x - t);
      row[t] = total;
      for (int o = WIDTH / 2; o >= 32; o /= 2) {
        __syncthreads();
        if (t < o) row[t] = total = total + row[t + o];
      }
      __syncthreads();
      total = row[t % 32];
    }
    return total;
  }

  // four warps for at::mean's one: terms go through shared memory, and each warp sums one of the
  // four accumulators in order. With fewer rows in flight their loads, sums and stores overlap:
  // 18.6 -> 14.2 us at 5376x2048 on H200, weights loaded early included.
  template <class S, class Term> static __device__ float together(Term term, float* shared) {
    static_assert(WIDTH == 32 && S::THREADS == 128 && S::V == 4);
    float* terms = shared + threadIdx.x / 128 * Floats<S>::VALUE;
    const int warp = S::thread() / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < 4; i++) terms[i * S::VECTORS + S::vector(k)] = term(k, i);
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < divide_up(S::VECTORS, 32); j++)
      if (S::VECTORS % 32 == 0 || lane + 32 * j < S::VECTORS)
        sum = __fadd_rn(sum, terms[warp * S::VECTORS + lane + 32 * j]);
    float* part = terms + 4 * S::VECTORS;
    part[warp * 32 + lane] = sum;
    __syncthreads();
    return ((part[lane] + part[32 + lane]) + part[64 + lane]) + part[96 + lane];
  }
  template <class S> struct Floats { static constexpr int VALUE = 4 * S::VECTORS + 128; };
};

template <int WIDTH, class S, int BLOCK> struct Scratch<MeanSum<WIDTH>, S, BLOCK> {
  static constexpr int FLOATS =
      S::THREADS == WIDTH ? BLOCK : larger(BLOCK / 128 * MeanSum<WIDTH>::template Floats<S>::VALUE, 96);
};

// x.float().pow(2).mean(-1): squares are rounded, and the sum is scaled by rows / elements in float32
template <int WIDTH> struct MeanRms {
  float scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float factor, float* shared) {
    auto square = [&](int k, int i) { const float v = x(k, i); return __fmul_rn(v, v); };
    const float total = MeanSum<WIDTH>::template of<S>(square, shared);
    scale = rsqrtf(__fadd_rn(__fmul_rn(total, factor), eps));
  }
  template <class R> __device__ float apply(float x, bool weighted, float w, bool, float) const {
    float y = R::mul(x, scale);
    return weighted ? R::mul(y, w) : y;
  }
};

template <int WIDTH, class S, int BLOCK> struct Scratch<MeanRms<WIDTH>, S, BLOCK> {
  static constexpr int FLOATS = Scratch<MeanSum<WIDTH>, S, BLOCK>::FLOATS;
};

// PyTorch's vectorised row kernels: 128 threads, thread t takes the 4-vectors t, t + 128, ...
// Here a row may have fewer threads; each then does the work of 128 / THREADS, with a state for each.
template <class S> struct Played {
  static_assert(S::V == 4 && 128 % S::THREADS == 0);
  static constexpr int WARPS = 128 / larger(S::THREADS, 32);  // states of a thread, a warp apart
  static __device__ __forceinline__ int state(int k) { return k % WARPS; }
};

// The sum of a row in their order: each thread's vectors one after the other, shuffles,
// (w0 + w2) + (w1 + w3). `add(k, i, sum)` is a sum with element i of vector k in it.
struct TorchTree {
  template <class S, class Add> static __device__ float of(Add add, float* shared) {
    if constexpr (Paired<S>::VALUE) {
      float part[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 8; i++) part[i / 4] = add(0, i, part[i / 4]);
      return paired_sum<S>(part);
    } else {
      return rows<S>(add, shared);
    }
  }

  template <class S, class Add> static __device__ float rows(Add add, float* shared) {
    constexpr int WARPS = Played<S>::WARPS;
    float part[WARPS] = {};
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& p = part[Played<S>::state(k)];
          p = add(k, i, p);
        }
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
      for (int o = smaller(S::THREADS, 32) / 2; o > 0; o /= 2)
        part[w] += __shfl_xor_sync(~0u, part[w], o);
    if constexpr (S::THREADS == 128) {
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = part[0];
      __syncthreads();
      const float* row = shared + threadIdx.x / 128 * 4;
      return (row[0] + row[2]) + (row[1] + row[3]);
    } else {
      static_assert(S::THREADS <= 32);
      return (part[0] + part[2]) + (part[1] + part[3]);
    }
  }
};

// the gradients of F.rms_norm and F.layer_norm: terms times a factor of the row, by fma
struct TorchSum {
  template <class S, class Term>
  static __device__ float of(Term term, float factor, float* shared) {
    return TorchTree::of<S>([&](int k, int i, float sum) { return __fmaf_rn(factor, term(k, i), sum); }, shared);
  }
};

// F.rms_norm: squares by fma, divided by N
struct TorchRms {
  float scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float, float* shared) {
    auto square = [&](int k, int i, float sum) { const float v = x(k, i); return __fmaf_rn(v, v, sum); };
    const float total = TorchTree::of<S>(square, shared);
    // multiplying by the inverse of a power of two is exact, and ten times as fast as dividing
    constexpr bool POWER_OF_TWO = (S::N & (S::N - 1)) == 0;
    const float mean = POWER_OF_TWO ? __fmul_rn(total, 1.f / S::N) : __fdiv_rn(total, float(S::N));
    scale = rsqrtf(__fadd_rn(mean, eps));
  }

  template <class R> __device__ float apply(float x, bool weighted, float w, bool, float) const {
    float y = __fmul_rn(scale, x);
    return R::keep(weighted ? __fmul_rn(w, y) : y);
  }
};

// F.rms_norm by QuACK's kernel, which PyTorch takes from 2.13 on where nvidia-cutlass-dsl and
// apache-tvm-ffi are installed: vectors of 16 bytes, one accumulator by fma, shuffles, (w0 + w2) +
// (w1 + w3); a division by a power of two is contracted with the addition of eps.
struct QuackRms {
  float scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float, float* shared) {
    static_assert(S::THREADS <= 128);
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < S::V; i++) { const float v = x(k, i); total = __fmaf_rn(v, v, total); }
#pragma unroll
    for (int o = smaller(S::THREADS, 32) / 2; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    if constexpr (S::THREADS > 32) {
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
      __syncthreads();
      const float* row = shared + threadIdx.x / S::THREADS * (S::THREADS / 32);
      total = S::THREADS == 64 ? row[0] + row[1] : (row[0] + row[2]) + (row[1] + row[3]);
    }
    constexpr bool POWER_OF_TWO = (S::N & (S::N - 1)) == 0;
    const float spread = POWER_OF_TWO ? __fmaf_rn(total, 1.f / S::N, eps)
                                      : __fadd_rn(__fdiv_rn(total, float(S::N)), eps);
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(spread));
  }
  template <class R> __device__ float apply(float x, bool weighted, float w, bool, float) const {
    const float y = __fmul_rn(x, scale);
    return R::keep(weighted ? __fmul_rn(y, w) : y);
  }
};

struct Welford { float mean, spread, count; };

__device__ __forceinline__ Welford take(float v, Welford a) {
  float delta = v - a.mean, count = a.count + 1.f, mean = a.mean + delta * (1.f / count);
  return {mean, a.spread + delta * (v - mean), count};
}

__device__ __forceinline__ Welford merge(Welford b, Welford a) {
  float delta = b.mean - a.mean, count = a.count + b.count;
  if (!(count > 0.f)) return {0.f, 0.f, 0.f};
  float each = 1.f / count, of_a = a.count * each, of_b = b.count * each;
  return {of_a * a.mean + of_b * b.mean, a.spread + b.spread + delta * delta * a.count * of_b, count};
}

// F.layer_norm: Welford's update along each thread, its merge along the tree of F.rms_norm.
// When every lane holds the same number of elements the counts are compile-time constants and the
// divisions vanish.
struct TorchLayer {
  float mean, scale;
  template <class S, class Get> __device__ void measure(Get x, float eps, float, float* shared) {
    Welford row[4] = {};
    if constexpr (Paired<S>::VALUE) row[0] = head<S>(x);
    else rows<S>(x, row, shared);
    Welford all = merge(merge(row[0], row[2]), merge(row[1], row[3]));
    mean = all.mean;
    scale = rsqrtf(all.spread / float(S::N) + eps);
  }

  // down the tree of PyTorch's lanes, to the first of LANES threads
  template <int LANES, bool FULL> static __device__ __forceinline__ void merge_lanes(Welford& part) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
      Welford other{__shfl_down_sync(~0u, part.mean, o, LANES), __shfl_down_sync(~0u, part.spread, o, LANES),
                    FULL ? part.count : __shfl_down_sync(~0u, part.count, o, LANES)};
      part = merge(part, other);
    }
  }
  template <int LANES, bool FULL> static __device__ __forceinline__ Welford of_first(const Welford& part) {
    return {__shfl_sync(~0u, part.mean, 0, LANES), __shfl_sync(~0u, part.spread, 0, LANES),
            FULL ? part.count : __shfl_sync(~0u, part.count, 0, LANES)};
  }

  // a row that a part of one of PyTorch's warps holds, two of its lanes a thread
  template <class S, class Get> static __device__ Welford head(Get x) {
    static_assert(S::FULL && S::THREADS <= 16);
    Welford part[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) part[i / 4] = take(x(0, i), part[i / 4]);
#pragma unroll
    for (int q = 0; q < 2; q++) merge_lanes<S::THREADS, true>(part[q]);
    return of_first<S::THREADS, true>(merge(part[0], part[1]));
  }

  // what each of PyTorch's four warps holds
  template <class S, class Get> static __device__ void rows(Get x, Welford (&row)[4], float* shared) {
    constexpr int WARPS = Played<S>::WARPS, LANES = smaller(S::THREADS, 32);
    Welford part[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) part[w] = {0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < S::K; k++)
      if (S::inside(k))
#pragma unroll
        for (int i = 0; i < 4; i++) part[Played<S>::state(k)] = take(x(k, i), part[Played<S>::state(k)]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) merge_lanes<LANES, S::FULL>(part[w]);
    if constexpr (S::THREADS == 128) {
      Welford* seen = reinterpret_cast<Welford*>(shared);
      if (threadIdx.x % 32 == 0) seen[threadIdx.x / 32] = part[0];
      __syncthreads();
#pragma unroll
      for (int w = 0; w < 4; w++) {
        row[w] = seen[threadIdx.x / 128 * 4 + w];
        if constexpr (S::FULL) row[w].count = S::N / 4;
      }
    } else {
#pragma unroll
      for (int w = 0; w < WARPS; w++) row[w] = of_first<LANES, S::FULL>(part[w]);
    }
  }
  template <class R> __device__ float apply(float x, bool weighted, float w, bool biased, float b) const {
    // contracted to fma where nvcc contracts PyTorch's expression
    const float y = __fmul_rn(scale, x - mean);
    if (!weighted) return R::keep(y);  // a bias alone is refused
    return R::keep(biased ? __fmaf_rn(w, y, b) : __fmul_rn(w, y));
  }
};

}  // namespace kernelwright
