// What a new kernel starts from: types, vector access, rounding policies, reductions, row addresses.
// No torch headers: the same files compile under NVRTC and in an ahead-of-time extension.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kernelwright {

using bfloat16 = __nv_bfloat16;
using i64 = long long;

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(half v) { return __half2float(v); }
__device__ __forceinline__ float widen(bfloat16 v) { return __bfloat162float(v); }

template <class T> __device__ __forceinline__ T narrow(float v);
template <> __device__ __forceinline__ float narrow<float>(float v) { return v; }
template <> __device__ __forceinline__ half narrow<half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ bfloat16 narrow<bfloat16>(float v) { return __float2bfloat16_rn(v); }

// v rounded to T, as a float. From sm_80 on by the packed conversion: the single one runs at a quarter
// of its rate, and rounding after every step then takes longer than the memory (adaln_rmsnorm, exact,
// 2x2688x2048 on H200: 19 against 15 us).
template <class T> __device__ __forceinline__ float rounded(float v) { return widen(narrow<T>(v)); }
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ float rounded<bfloat16>(float v) {
  unsigned bits;  // bfloat16 in the upper half, zero below: the float it stands for
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v), "f"(0.f));
  return __uint_as_float(bits);
}
template <> __device__ __forceinline__ float rounded<half>(float v) { return __low2float(__floats2half2_rn(v, 0.f)); }
#endif

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// V neighbouring elements, moved in pieces of at most 16 bytes, and of at most A elements where
// that is all their alignment allows
template <class T, int V, int A = V> struct Vec {
  static constexpr int PIECE = smaller(A, smaller(V, 16 / sizeof(T)));
  struct alignas(PIECE * sizeof(T)) Piece { T v[PIECE]; };
  Piece piece[V / PIECE];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < V / PIECE; i++) piece[i] = reinterpret_cast<const Piece*>(p)[i];
  }
  __device__ __forceinline__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < V / PIECE; i++) reinterpret_cast<Piece*>(p)[i] = piece[i];
  }
  __device__ __forceinline__ float get(int i) const { return widen(piece[i / PIECE].v[i % PIECE]); }
  __device__ __forceinline__ void set(int i, float f) { piece[i / PIECE].v[i % PIECE] = narrow<T>(f); }
};

// How to round. Once: float32 throughout, one rounding at the store, multiply-add may contract.
struct Once {
  static __device__ __forceinline__ float keep(float v) { return v; }
  static __device__ __forceinline__ float mul(float a, float b) { return a * b; }
  static __device__ __forceinline__ float add(float a, float b) { return a + b; }
  template <class A, class B> static __device__ __forceinline__ float product(float a, float b) { return a * b; }
  template <class A> static __device__ __forceinline__ float one_plus(float a) { return 1.f + a; }
};

// Each<C>: to C after every step, as an eager chain of C tensors does. Each<float> only forbids
// contraction: what eager does to float32 tensors. A step whose operands have dtypes of their own
// rounds to what eager promotes those to.
template <class C> struct Each {
  static __device__ __forceinline__ float keep(float v) { return rounded<C>(v); }
  static __device__ __forceinline__ float mul(float a, float b) { return keep(__fmul_rn(a, b)); }
  static __device__ __forceinline__ float add(float a, float b) { return keep(__fadd_rn(a, b)); }
  template <class A, class B> static __device__ __forceinline__ float product(float a, float b) {
    float p = __fmul_rn(a, b);
    return same<A, B> ? rounded<A>(p) : p;  // two 16-bit dtypes promote to float as well
  }
  template <class A> static __device__ __forceinline__ float one_plus(float a) {
    return rounded<A>(__fadd_rn(1.f, a));
  }
};

// Sums over the THREADS neighbouring threads of a row, the same values in each. The tree pairs
// threads 16, 8, 4, 2, 1 apart inside a warp; addition commutes, so every lane ends on the bits
// that a shuffle-down would leave in lane 0. `shared` has a float for each warp of the block and sum.
template <int THREADS, int SUMS> __device__ __forceinline__ void row_sums(float (&v)[SUMS], float* shared) {
#pragma unroll
  for (int o = smaller(THREADS, 32) / 2; o > 0; o /= 2)
#pragma unroll
    for (int s = 0; s < SUMS; s++) v[s] += __shfl_xor_sync(~0u, v[s], o);
  if constexpr (THREADS > 32) {
    constexpr int WARPS = THREADS / 32;
    const int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int s = 0; s < SUMS; s++) shared[warp * SUMS + s] = v[s];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
      v[s] = shared[first * SUMS + s];
#pragma unroll
      for (int w = 1; w < WARPS; w++) v[s] += shared[(first + w) * SUMS + s];
    }
  }
}

template <int THREADS> __device__ __forceinline__ float row_sum(float v, float* shared) {
  float one[1] = {v};
  row_sums<THREADS, 1>(one, shared);
  return one[0];
}

// Rows lie on up to three dimensions; an operand has a stride for each, zero where it is broadcast.
struct Place { i64 outer, middle, inner; };
struct Rows { unsigned count, middle, inner; };

template <int DIMS> struct RowIndex {
  unsigned outer = 0, middle = 0, inner = 0;
  __device__ __forceinline__ RowIndex(unsigned row, const Rows& rows) {
    inner = row;
    if constexpr (DIMS > 1) { middle = row / rows.inner; inner = row % rows.inner; }
    if constexpr (DIMS > 2) { outer = middle / rows.middle; middle = middle % rows.middle; }
  }
  __device__ __forceinline__ i64 offset(const Place& p) const {
    i64 o = inner * p.inner;
    if constexpr (DIMS > 1) o += middle * p.middle;
    if constexpr (DIMS > 2) o += outer * p.outer;
    return o;
  }
};

// A row of N elements over THREADS threads: thread t holds the vectors t, t + THREADS, ...
template <int N_, int V_, int THREADS_> struct Spread {
  static constexpr int N = N_, V = V_, THREADS = THREADS_;
  static_assert(N % V == 0, "a vector must not cross the end of a row");
  static constexpr int VECTORS = N / V, K = divide_up(VECTORS, THREADS);
  static constexpr bool FULL = VECTORS % THREADS == 0;
  static __device__ __forceinline__ int thread() { return threadIdx.x % THREADS; }
  static __device__ __forceinline__ int vector(int k) { return thread() + k * THREADS; }
  static __device__ __forceinline__ bool inside(int k) { return FULL || vector(k) < VECTORS; }
};

}  // namespace kernelwright
