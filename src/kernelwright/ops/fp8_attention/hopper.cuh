// What Hopper has for a stream of tiles: barriers in shared memory, bulk copies that arrive at them, and
// products that a warpgroup (four warps) starts and waits for later. checking/emulated_hopper.hpp has the
// same without a GPU.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

// Shared memory beside what a kernel declares, of as many bytes as it is launched with.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ unsigned char memory[];
  return memory;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A barrier whose phases alternate: one ends after `count` arrivals, and when the bytes that were announced are there.
struct Barrier {
  unsigned long long word;

  __device__ __forceinline__ unsigned address() const { return shared_address(&word); }
  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ __forceinline__ void arrive_expecting(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Waits for the end of the phase of this parity.
  __device__ __forceinline__ void wait(int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(address()), "r"(phase) : "memory");
  }
};

__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Starts a copy of contiguous bytes, a multiple of 16, that arrives at a barrier.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, Barrier& at) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(bytes), "r"(at.address()) : "memory");
}

// Starts a copy of BYTES, or of zeros if nothing is there. A thread waits for all that it has started.
template <int BYTES> __device__ __forceinline__ void start_copy(void* to, const void* from, bool there) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? BYTES : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES),
                 "r"(there ? BYTES : 0) : "memory");
  }
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Registers of the threads of a warpgroup. Those that one gives back another may take.
template <int N> __device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// The second operand of a product in shared memory: rows of eight-bit numbers along the summed dimension, in blocks of
// 8 rows x 16 bytes that lie one after the other along that dimension.
struct Operand {
  static constexpr int BLOCK = 128;  // bytes
  unsigned long long descriptor;

  // `across`: bytes from 8 rows to the next 8
  __device__ __forceinline__ Operand(const void* p, int across)
      : descriptor((unsigned long long)((shared_address(p) & 0x3FFFF) >> 4) | (unsigned long long)(BLOCK >> 4) << 16 |
                   (unsigned long long)(across >> 4) << 32) {}
  // the k-th 32 numbers of each row
  __device__ __forceinline__ unsigned long long step(int k) const { return descriptor + k * (2 * BLOCK >> 4); }
};

// Warpgroups take turns: one waits for its turn, which another gives it.
__device__ __forceinline__ void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn_to(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are under way.
template <int N> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler must not read results before this point: products write them behind its back.
template <int N> __device__ __forceinline__ void results_are_there(int (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
template <int N> __device__ __forceinline__ void results_are_there(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// The operands of an asm statement that are elements of an array, and their names in it.
#define KW_8(c, x, i) c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), c(x[i + 7])
#define KW_32(c, x, i) KW_8(c, x, i), KW_8(c, x, i + 8), KW_8(c, x, i + 16), KW_8(c, x, i + 24)
#define KW_NAMES_32                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KW_NAMES_64                                                                                   \
  KW_NAMES_32                                                                                         \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Starts c += a bᵀ for 64 rows of a, of which each thread holds its part of 32 columns, and 128 rows of b,
// or 64 of those that give floats.
__device__ __forceinline__ void start_product(int (&c)[64], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" KW_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1;"
               : KW_32("+r", c, 0), KW_32("+r", c, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void start_product(float (&c)[64], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" KW_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1;"
               : KW_32("+f", c, 0), KW_32("+f", c, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void start_product(float (&c)[32], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" KW_NAMES_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1;"
               : KW_32("+f", c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same, but c = a bᵀ.
__device__ __forceinline__ void start_new_product(int (&c)[64], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" KW_NAMES_64 "}, {%64, %65, %66, %67}, %68, 0;"
               : KW_32("=r", c, 0), KW_32("=r", c, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Four numbers in fp8 (e4m3), the first in the lowest byte.
__device__ __forceinline__ unsigned four_e4m3(float a, float b, float c, float d) {
  unsigned result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}" : "=r"(result) : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

__device__ __forceinline__ int max_of_three(int a, int b, int c) { return __vimax3_s32(a, b, c); }

// within two units of the last place; 0 for minus infinity
__device__ __forceinline__ float exp2_near(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kernelwright
