"""Runs generated CUDA C++ without a GPU: g++ compiles it, and the threads of a block take turns.

A thread runs until it waits for others, at a barrier or a shuffle; all threads of a block wait at
the same places. Packed 16-bit arithmetic takes the path of GPUs before sm_80.
"""

import ctypes
import re
import struct
import subprocess

from kernelwright.backends import cuda
from kernelwright.fuser import launching

BEFORE = r"""
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
#define __expf expf
#define __fdividef(a, b) ((a) / (b))
struct Index { unsigned x; } threadIdx, blockIdx, gridDim;
static ucontext_t scheduler, fibers[1024];
static bool finished[1024];
static float slots[1024];
static void __syncthreads() { swapcontext(&fibers[threadIdx.x], &scheduler); }
static float taken(float v, unsigned from) {
  slots[threadIdx.x] = v;
  __syncthreads();
  const float found = slots[from];
  __syncthreads();
  return found;
}
static float __shfl_xor_sync(unsigned, float v, int o) { return taken(v, threadIdx.x ^ o); }
static float __shfl_down_sync(unsigned, float v, int o, int width = 32) {
  return taken(v, threadIdx.x % width + o < unsigned(width) ? threadIdx.x + o : threadIdx.x);
}
static float __shfl_sync(unsigned, float v, int from, int width = 32) {
  return taken(v, threadIdx.x / width * width + from);
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float rsqrtf(float a) { return 1.f / sqrtf(a); }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= unsigned(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct half { unsigned short bits; };  // not computed with
struct half2 { half x, y; };
static float __half2float(half) { abort(); }
static half __float2half_rn(float) { abort(); }
static float __low2float(half2) { abort(); }
static float __high2float(half2) { abort(); }
static half2 __floats2half2_rn(float, float) { abort(); }
struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
static __nv_bfloat16 __float2bfloat16_rn(float v) {
  const unsigned u = __float_as_uint(v);
  return {(unsigned short)(v != v ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
static __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
"""
AFTER = r"""
static Args given;
static void thread() {
  kernelwright_program(given);
  finished[threadIdx.x] = true;
  __syncthreads();
}
extern "C" void launch(const void* args, unsigned grid, unsigned block) {
  constexpr size_t STACK = 1 << 16;
  static char* const stacks = (char*)malloc(1024 * STACK);
  memcpy(&given, args, sizeof given);
  gridDim.x = grid;
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
"""


def launched(kernel, tensors, folder):
    """Runs a kernel on CPU tensors, which have the names that its pointers have."""
    launch = launching.launch_of(kernel)
    source, library = folder / "kernel.cpp", folder / f"{abs(hash(kernel.code))}.so"
    source.write_text(BEFORE + _whole(kernel.code) + AFTER)
    flags = ["-std=c++17", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["g++", *flags, "-o", library, source], check=True)
    places = [tensors[n].data_ptr() + o * tensors[n].element_size() for n, o in kernel.pointers]
    arguments = struct.pack(f"@{len(places)}P{launch.layout}0q", *places, *launch.scalars)
    ctypes.CDLL(str(library)).launch(arguments, launch.grid, launch.block)


def _whole(code):
    """A source with its headers in it."""
    headers, seen = cuda.headers(), set()

    def included(match):
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _filled(headers[name])

    def _filled(text):
        return re.sub(r'#include "([^"]+)"', included, text)

    text = re.sub(r"#include <cuda_.*|#pragma once", "", _filled(code))
    text = text.replace("const size_t at = __cvta_generic_to_global(p);", "")
    return re.sub(r"asm volatile\(.*?\);", "*p = value;", text)
