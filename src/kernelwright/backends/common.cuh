// What all kernels share: types, vector access, rounding policies, reductions, row addresses.
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
// of its rate, and rounding after every step then takes longer than the memory traffic
// (adaln_rmsnorm, exact, 2x2688x2048 on H200: 19 against 15 us).
template <class T> __device__ __forceinline__ float rounded(float v) { return widen(narrow<T>(v)); }
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ float rounded<bfloat16>(float v) {
  unsigned bits;  // bfloat16 in the upper half, zeros below: the bits of the same float
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(v), "f"(0.f));
  return __uint_as_float(bits);
}
template <> __device__ __forceinline__ float rounded<half>(float v) { return __low2float(__floats2half2_rn(v, 0.f)); }
#endif

// two numbers rounded to 16 bits, the first in the lower half
template <class T> __device__ __forceinline__ unsigned pair(float low, float high);
template <> __device__ __forceinline__ unsigned pair<half>(float low, float high) {
  const half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}
template <> __device__ __forceinline__ unsigned pair<bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}

// Two 16-bit numbers of a word, as pair() makes it.
template <class T> __device__ __forceinline__ float of_pair(unsigned two, int i);
template <> __device__ __forceinline__ float of_pair<half>(unsigned two, int i) {
  const half2 both = reinterpret_cast<const half2&>(two);
  return i ? __high2float(both) : __low2float(both);
}
template <> __device__ __forceinline__ float of_pair<bfloat16>(unsigned two, int i) {
  return __uint_as_float(i ? two & 0xffff0000u : two << 16);
}
// the halves `low` and `high` of two words as one
__device__ __forceinline__ unsigned halves(unsigned a, int low, unsigned b, int high) {
  return __byte_perm(a, b, (low ? 0x32 : 0x10) | (high ? 0x7600 : 0x5400));
}

// Sums, differences and products of pairs, one instruction each from sm_80 on. They have the bits of
// float32 arithmetic rounded to 16 bits. A product of two is exact in float32; where bfloat16's falls
// below float32's smallest step it is under half of bfloat16's smallest number, and zero either way.
// A sum is exact in float32, or one operand is so small beside the other that no tie is near.
template <class T> __device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b);
template <class T> __device__ __forceinline__ unsigned sub_pairs(unsigned a, unsigned b);
template <class T> __device__ __forceinline__ unsigned mul_pairs(unsigned a, unsigned b);
#if __CUDA_ARCH__ >= 800
#define KERNELWRIGHT_PAIRS(NAME, T, T2, OF)                                                     \
  template <> __device__ __forceinline__ unsigned NAME<T>(unsigned a, unsigned b) {             \
    const T2 both = OF(reinterpret_cast<const T2&>(a), reinterpret_cast<const T2&>(b));         \
    return reinterpret_cast<const unsigned&>(both);                                             \
  }
KERNELWRIGHT_PAIRS(add_pairs, half, half2, __hadd2_rn)
KERNELWRIGHT_PAIRS(sub_pairs, half, half2, __hsub2_rn)
KERNELWRIGHT_PAIRS(mul_pairs, half, half2, __hmul2_rn)
KERNELWRIGHT_PAIRS(add_pairs, bfloat16, __nv_bfloat162, __hadd2_rn)
KERNELWRIGHT_PAIRS(sub_pairs, bfloat16, __nv_bfloat162, __hsub2_rn)
KERNELWRIGHT_PAIRS(mul_pairs, bfloat16, __nv_bfloat162, __hmul2_rn)
#undef KERNELWRIGHT_PAIRS
#else
template <class T> __device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
  return pair<T>(of_pair<T>(a, 0) + of_pair<T>(b, 0), of_pair<T>(a, 1) + of_pair<T>(b, 1));
}
template <class T> __device__ __forceinline__ unsigned sub_pairs(unsigned a, unsigned b) {
  return pair<T>(of_pair<T>(a, 0) - of_pair<T>(b, 0), of_pair<T>(a, 1) - of_pair<T>(b, 1));
}
template <class T> __device__ __forceinline__ unsigned mul_pairs(unsigned a, unsigned b) {
  return pair<T>(of_pair<T>(a, 0) * of_pair<T>(b, 0), of_pair<T>(a, 1) * of_pair<T>(b, 1));
}
#endif

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// N neighbours in registers. 16-bit values are packed in pairs: one instruction rounds both; rounding
// each by itself takes four times as long.
template <class T, int N, bool WORDS = sizeof(T) == 2 && N % 2 == 0> struct Neighbours {
  T v[N];
  __device__ __forceinline__ float get(int i) const { return widen(v[i]); }
  __device__ __forceinline__ void set(int i, float f) { v[i] = narrow<T>(f); }
};
template <class T, int N> struct Neighbours<T, N, true> {
  unsigned word[N / 2];
  __device__ __forceinline__ float get(int i) const { return of_pair<T>(word[i / 2], i % 2); }
  __device__ __forceinline__ void set(int i, float low, float high) { word[i / 2] = pair<T>(low, high); }
};

// A store to global memory that the compiler does not split, as it does with some plain stores
// (gated_residual_norm, 2x2688x2048 on H200: 23.5 us, 28.8 with 12 stores instead of 4). The compiler
// may move loads across it: not for memory that the same thread reads again.
template <class T> __device__ __forceinline__ void write_whole(T* p, const T& value) {
  const size_t at = __cvta_generic_to_global(p);
  if constexpr (sizeof(T) == 16) {
    const uint4& w = reinterpret_cast<const uint4&>(value);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
  } else if constexpr (sizeof(T) == 8) {
    const uint2& w = reinterpret_cast<const uint2&>(value);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(w.x), "r"(w.y));
  } else {
    *p = value;
  }
}

// V neighbouring elements, moved in accesses of at most 16 bytes, and of at most A elements, as their
// alignment allows
template <class T, int V, int A = V> struct Vec {
  static constexpr int PIECE = smaller(A, smaller(V, 16 / sizeof(T)));
  struct alignas(PIECE * sizeof(T)) Piece : Neighbours<T, PIECE> {};
  Piece piece[V / PIECE];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < V / PIECE; i++) piece[i] = reinterpret_cast<const Piece*>(p)[i];
  }
  __device__ __forceinline__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < V / PIECE; i++) reinterpret_cast<Piece*>(p)[i] = piece[i];
  }
  __device__ __forceinline__ void store_whole(T* p) const {
#pragma unroll
    for (int i = 0; i < V / PIECE; i++) write_whole(reinterpret_cast<Piece*>(p) + i, piece[i]);
  }
  __device__ __forceinline__ float get(int i) const { return piece[i / PIECE].get(i % PIECE); }
  // of 16-bit elements: i and i + 1, i even, as one word
  __device__ __forceinline__ unsigned& word(int i) { return piece[i / PIECE].word[i % PIECE / 2]; }
  // elements i and i + 1, i even, rounded
  __device__ __forceinline__ void set(int i, float low, float high) {
    if constexpr (sizeof(T) == 2 && PIECE % 2 == 0) {
      piece[i / PIECE].set(i % PIECE, low, high);
    } else {
      piece[i / PIECE].set(i % PIECE, low);
      piece[(i + 1) / PIECE].set((i + 1) % PIECE, high);
    }
  }
  // every element i by value(i), rounded
  template <class Value> __device__ __forceinline__ void fill(Value value) {
    if constexpr (V == 1) {
      piece[0].set(0, value(0));
    } else {
#pragma unroll
      for (int i = 0; i < V; i += 2) {
        const float low = value(i);  // evaluated before the next: value may shuffle
        set(i, low, value(i + 1));
      }
    }
  }
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
// contraction, as eager on float32 tensors does. A step with operands of other dtypes rounds to the
// dtype that eager promotes them to.
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

// n / size for n below 2^31, without a division
struct Divisor {
  unsigned size, factor, shift;
  __device__ __forceinline__ unsigned into(unsigned n) const { return __umulhi(n, factor) >> shift; }
};

// Rows have up to three dimensions; an operand has a stride for each, zero where it is broadcast.
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
