// RMSNorm of bfloat16 rows with nothing but CUDA's headers: y = x / sqrt(mean(x^2) + eps) * weight.
// For a project without kernelwright. One block a row, 16-byte loads, sums by shuffles. The width is
// a multiple of 8, x, weight and y are 16-byte aligned, and blockDim.x is a multiple of 32.
#pragma once
#include <cuda_bf16.h>

// eight neighbours in one load
struct alignas(16) Eight {
  __nv_bfloat16 v[8];
};

// the sum over a warp, in every lane
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(~0u, v, lanes);
  return v;
}

// the sum over a block of up to 1024 threads, in every thread
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float of_warp[32];
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.f;
  return warp_sum(v);
}

__device__ __forceinline__ void rmsnorm_row(
    const __nv_bfloat16* x, const __nv_bfloat16* weight, __nv_bfloat16* y, int width, float eps) {
  const Eight* rows = (const Eight*)(x + (long long)blockIdx.x * width);
  float sum = 0.f;
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    const Eight here = rows[i];
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const float f = __bfloat162float(here.v[k]);
      sum += f * f;
    }
  }
  const float scale = rsqrtf(block_sum(sum) / width + eps);
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    const Eight here = rows[i], by = ((const Eight*)weight)[i];  // the row again, from the cache
    Eight out;
#pragma unroll
    for (int k = 0; k < 8; k++)
      out.v[k] = __float2bfloat16(__bfloat162float(here.v[k]) * scale * __bfloat162float(by.v[k]));
    ((Eight*)(y + (long long)blockIdx.x * width))[i] = out;
  }
}
