// What a kernel needs of CUDA, for g++: emulator.py puts this before the kernel's source.
//
// The threads of a block take turns: each runs until it waits for others, at a barrier or a shuffle.
// Packed 16-bit arithmetic takes the path of GPUs before sm_80.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __expf expf
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __powf powf
#define __fdividef(a, b) ((a) / (b))
#define __float2int_rn(x) ((int)rintf(x))
#define __float2int_rz(x) ((int)(x))
#define __float2int_ru(x) ((int)ceilf(x))
using std::isfinite;
using std::isinf;
using std::isnan;
static struct Index { unsigned x = 0, y = 0, z = 0; } threadIdx, blockIdx;
static struct Extent { unsigned x = 1, y = 1, z = 1; } blockDim, gridDim;
constexpr int warpSize = 32;
static ucontext_t scheduler, fibers[1024];
static bool finished[1024];
static unsigned slots[1024];
static void __syncthreads() { swapcontext(&fibers[threadIdx.x], &scheduler); }
static void __syncwarp(unsigned = ~0u) { __syncthreads(); }
template <class T> static T taken(T v, unsigned from) {
  static_assert(sizeof v == sizeof *slots, "a shuffle of 4 bytes");
  memcpy(&slots[threadIdx.x], &v, sizeof v);
  __syncthreads();
  memcpy(&v, &slots[from], sizeof v);
  __syncthreads();
  return v;
}
template <class T> static T __shfl_xor_sync(unsigned, T v, int o, int = 32) { return taken(v, threadIdx.x ^ o); }
template <class T> static T __shfl_down_sync(unsigned, T v, int o, int width = 32) {
  return taken(v, threadIdx.x % width + o < unsigned(width) ? threadIdx.x + o : threadIdx.x);
}
template <class T> static T __shfl_sync(unsigned, T v, int from, int width = 32) {
  return taken(v, threadIdx.x / width * width + from);
}
static bool __any_sync(unsigned, bool v) {
  slots[threadIdx.x] = v;
  __syncthreads();
  bool any = false;
  for (int i = 0; i < 32; i++) any |= slots[threadIdx.x / 32 * 32 + i];
  __syncthreads();
  return any;
}
static unsigned __reduce_max_sync(unsigned, unsigned v) {
  slots[threadIdx.x] = v;
  __syncthreads();
  for (int i = 0; i < 32; i++) v = slots[threadIdx.x / 32 * 32 + i] > v ? slots[threadIdx.x / 32 * 32 + i] : v;
  __syncthreads();
  return v;
}
static bool __all_sync(unsigned all, bool v) { return !__any_sync(all, !v); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.f / a; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __frsqrt_rn(float a) { return 1.f / sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float rsqrtf(float a) { return 1.f / sqrtf(a); }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
static int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= unsigned(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
template <class T> static T __ldg(const T* p) { return *p; }
static unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  const unsigned long long old = *p;  // threads take turns
  *p += v;
  return old;
}
static void __trap() { abort(); }
template <class A, class B> static auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static auto max(A a, B b) { return a > b ? a : b; }
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
#ifdef __ARM_FP16_FORMAT_IEEE  // g++ knows _Float16 there from version 13 on only
typedef __fp16 float16;
#else
typedef _Float16 float16;
#endif
struct half { float16 v; };
struct half2 { half x, y; };
typedef half __half;
typedef half2 __half2;
static float __half2float(half v) { return v.v; }
static half __float2half_rn(float v) { return {(float16)v}; }
static half __float2half(float v) { return {(float16)v}; }
static float __low2float(half2 v) { return v.x.v; }
static float __high2float(half2 v) { return v.y.v; }
static half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
static __nv_bfloat16 __float2bfloat16_rn(float v) {
  const unsigned u = __float_as_uint(v);
  return {(unsigned short)(v != v ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
static __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }
static __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}

// the nearest fp8 numbers (e4m3), ties to even; beyond the largest one, that
static unsigned e4m3(float x) {
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  const float v = fabsf(x);
  if (v != v) return sign | 0x7f;
  if (v >= 448.f) return sign | 0x7e;
  int exponent;
  frexpf(v, &exponent);
  exponent = v == 0.f || exponent < -5 ? -6 : exponent - 1;
  return sign | unsigned((exponent + 6) * 8 + (int)nearbyintf(ldexpf(v, 3 - exponent)));
}
static unsigned short e4m3_pair(float low, float high) { return (unsigned short)(e4m3(high) << 8 | e4m3(low)); }

static void (*kernel)();
static void thread() {
  kernel();
  finished[threadIdx.x] = true;
  __syncthreads();
}
static void launch_blocks(void (*of)(), unsigned grid, unsigned block) {
  constexpr size_t STACK = 1 << 16;
  static char* const stacks = (char*)malloc(1024 * STACK);
  kernel = of;
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    for (unsigned t = 0; t < block; t++) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks + t * STACK;
      fibers[t].uc_stack.ss_size = STACK;
      makecontext(&fibers[t], thread, 0);
      finished[t] = false;
    }
    for (unsigned left = block; left;)
      for (unsigned t = 0; t < block; t++) {
        if (finished[t]) continue;
        threadIdx.x = t;
        swapcontext(&scheduler, &fibers[t]);
        left -= finished[t];
      }
  }
}
