// y = x W^T for up to sixteen rows x and a weight in eight bits, by tensor cores: it is read once,
// straight into the registers that mma.m16n8k16 takes it from, and multiplied with eight rows an
// instruction, in 16 bits.
//
// An mma sums over 16 positions k. Any 16 will do, as long as both operands have the same: so a
// thread takes neighbours of a weight, 16 bytes at once, and those of x that belong to them.
#pragma once
#include "ops/few_rows/cuda.cuh"

namespace kernelwright {

struct TensorCoreRowsArgs {
  const void *x, *weight, *bias, *scale;
  void* y;
  unsigned n, k, rows;  // outputs of a row, its width, and the number of rows
};

struct Sums { float of[4]; };  // of outputs g, g, g + 8, g + 8 and rows 2t, 2t + 1 of each

// 16 outputs by 8 rows; thread 4g + t has outputs g and g + 8, and row g of x, at its positions k
template <class T>
__device__ __forceinline__ void multiply(Sums& sums, const unsigned (&w)[4], unsigned low, unsigned high) {
  float* c = sums.of;
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
  if constexpr (same<T, half>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
#endif
#else
  static unsigned held[1024][6];
  const int me = threadIdx.x, warp = me / 32 * 32, g = me % 32 / 4, t = me % 4;
  for (int i = 0; i < 4; i++) held[me][i] = w[i];
  held[me][4] = low, held[me][5] = high;
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int u = 0; u < 4; u++) {
      const unsigned *a = held[warp + 4 * g + u], *b = held[warp + 4 * (2 * t + i % 2) + u];
      for (int h = 0; h < 2; h++) {
        c[i] += of_pair<T>(a[i / 2], h) * of_pair<T>(b[4], h);
        c[i] += of_pair<T>(a[2 + i / 2], h) * of_pair<T>(b[5], h);
      }
    }
  __syncwarp();
#endif
}

// Four integers as pairs of T: those of the even bytes, and those of the odd ones. BASE is the number
// from which on T has ulps of one; a two's complement is its last seven bits, less 128 if it is negative.
template <class T> __device__ __forceinline__ void of_integers(unsigned four, unsigned& even, unsigned& odd) {
  constexpr unsigned BASE = same<T, half> ? 0x64006400u : 0x43004300u;  // 1024 and 128, twice
  constexpr unsigned BITS = 0x007f007fu, SIGN = 0x00800080u;
  even = sub_pairs<T>(BASE | (four & BITS), BASE | (four & SIGN));
  odd = sub_pairs<T>(BASE | (four >> 8 & BITS), BASE | (four >> 8 & SIGN));
}

// Four e4m3 numbers as pairs of T: those of the even bytes, and those of the odd ones. Shifted into
// the place of T's exponent and mantissa they are too small by a power of two, subnormal ones as well.
// (The quantiser makes no NaN: a row with one has the scale NaN.)
template <class T, class W> __device__ __forceinline__ void of_eight(unsigned four, unsigned& even, unsigned& odd) {
  if constexpr (same<W, Integer>) return of_integers<T>(four, even, odd);
  constexpr bool HALF = same<T, half>;
  constexpr unsigned BITS = HALF ? 0x3f803f80u : 0x07f007f0u, SIGN = 0x80008000u;
  constexpr unsigned POWER = HALF ? 0x5c005c00u : 0x7b807b80u;  // 2^8 and 2^120, twice
  even = mul_pairs<T>((four << (HALF ? 7 : 4) & BITS) | (four << 8 & SIGN), POWER);
  odd = mul_pairs<T>((four >> (HALF ? 1 : 4) & BITS) | (four & SIGN), POWER);
}

// A block has 16 outputs (with GLU, 8 gates and their ups) of OCTETS times 8 rows; its warps share the
// width. AHEAD: loads of an output that are under way in a thread.
template <class X, class W, int OCTETS, int AHEAD, int WARPS, bool GLU>
__device__ __forceinline__ void rows_by_tensor_cores(const TensorCoreRowsArgs& a) {
  constexpr int V = 16, PIECES = 2, EACH = GLU ? 8 : 16;  // weights of a load, and loads of x for them
  constexpr unsigned STEP = 4 * V;  // of the four threads that read the same output
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned first = blockIdx.x * EACH;
  const W* weight[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // outputs beyond the last one are computed as the last, and not stored
    const unsigned n = min(first + g + (GLU ? 0 : 8 * h), a.n - 1) + (GLU && h ? a.n : 0);
    weight[h] = (const W*)a.weight + (i64)n * a.k;
  }
  Sums sums[OCTETS] = {};
  for (unsigned base = 0; base < a.k; base += WARPS * AHEAD * STEP) {
    const unsigned from = base + warp * AHEAD * STEP + t * V;
    uint4 held[AHEAD][2], rows[AHEAD][OCTETS][PIECES];
#pragma unroll
    for (int d = 0; d < AHEAD; d++) {
      // beyond the width and the rows, loads are of the first ones, and x counts as zero: a branch
      // around a load would keep it from being under way with others
      const bool inside = from + d * STEP < a.k;
      const unsigned k = inside ? from + d * STEP : 0;
#pragma unroll
      for (int h = 0; h < 2; h++) held[d][h] = passing(weight[h] + k);
#pragma unroll
      for (int o = 0; o < OCTETS; o++) {
        const bool counts = inside && 8 * o + g < (int)a.rows;
        const uint4* row = (const uint4*)((const X*)a.x + (i64)(counts ? 8 * o + g : 0) * a.k + k);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
          const uint4 v = __ldg(row + p);
          rows[d][o][p] = counts ? v : uint4{0, 0, 0, 0};
        }
      }
    }
#pragma unroll
    for (int d = 0; d < AHEAD; d++)
#pragma unroll
      for (int j = 0; j < V / 4; j++) {  // an mma takes four neighbours of each output
        unsigned w[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4& v = held[d][h];
          of_eight<X, W>(j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w, w[h], w[2 + h]);
        }
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
          const uint4& v = rows[d][o][j / 2];
          const unsigned one = j % 2 ? v.z : v.x, two = j % 2 ? v.w : v.y;
          // paired as of_eight pairs weights
          multiply<X>(sums[o], w, halves(one, 0, two, 0), halves(one, 1, two, 1));
        }
      }
  }
  __shared__ Sums shared[WARPS][OCTETS][32];
#pragma unroll
  for (int o = 0; o < OCTETS; o++) shared[warp][o][lane] = sums[o];
  __syncthreads();
  if (warp >= OCTETS) return;
  Sums total = shared[0][warp][lane];
  for (int w = 1; w < WARPS; w++)
#pragma unroll
    for (int c = 0; c < 4; c++) total.of[c] += shared[w][warp][lane].of[c];
#pragma unroll
  for (int c = 0; c < (GLU ? 2 : 4); c++) {
    const unsigned n = first + g + c / 2 * 8, m = warp * 8 + 2 * t + c % 2;
    if (n >= a.n || m >= a.rows) continue;
    float y = total.of[c] * ((const float*)a.scale)[n];
    if constexpr (GLU) {
      y = Silu<false>::of(y) * (total.of[2 + c] * ((const float*)a.scale)[a.n + n]);
    } else if (a.bias) {
      y += widen(((const X*)a.bias)[n]);
    }
    ((X*)a.y)[(i64)m * a.n + n] = narrow<X>(y);
  }
}

}  // namespace kernelwright
