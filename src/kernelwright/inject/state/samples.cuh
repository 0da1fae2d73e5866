// Whether samples of tensors are still what they were: pieces of rows and columns against copies of them.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

struct Piece {
  const unsigned char* now;
  i64 step;  // bytes from one element to the next; a copy has none between them
  i64 count;
  const unsigned char* then;
};

struct SampleArgs {
  const Piece* pieces;  // one a block
  bool* unchanged;      // set before; all who write to it write the same
};

template <class T> __device__ __forceinline__ void compare_samples(const SampleArgs& args) {
  const Piece piece = args.pieces[blockIdx.x];
  bool same = true;
#pragma unroll 4
  for (i64 i = threadIdx.x; i < piece.count; i += blockDim.x)
    same &= *reinterpret_cast<const T*>(piece.now + i * piece.step) == reinterpret_cast<const T*>(piece.then)[i];
  if (!same) *args.unchanged = false;
}

}  // namespace kernelwright
