// A value of each thread of a block of 1024 threads, combined in the order of PyTorch's softmax.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

// A tree in each of the 32 warps, then one of the warps.
template <class F> __device__ __forceinline__ float over_block(float v, F combine) {
  __shared__ float of_warp[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 16; step; step /= 2) v = combine(v, __shfl_down_sync(~0u, v, step));
  if (lane == 0) of_warp[warp] = v;
  __syncthreads();
  v = of_warp[lane];
  for (int step = 16; step; step /= 2) v = combine(v, __shfl_down_sync(~0u, v, step));
  if (threadIdx.x == 0) of_warp[0] = v;
  __syncthreads();
  v = of_warp[0];
  __syncthreads();  // it is written again by the next call
  return v;
}

}  // namespace kernelwright
