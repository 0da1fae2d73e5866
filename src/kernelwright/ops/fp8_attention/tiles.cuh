// Tiles of keys and values in eight bits: quantize.cuh writes them, cuda.cuh reads them.
#pragma once
#include "backends/common.cuh"

namespace kernelwright {

constexpr int TILE = 128;  // keys
constexpr float LARGEST = 448.f;  // of fp8
constexpr float LARGEST_INT = 127.f;

// Of a tile of keys and values. Where a number is not finite, its scale is not.
struct alignas(16) TileScales {
  float keys, values;  // that of the values is a power of two
  float length;  // of its longest key
  float unused;
};

// The lowest 8 bits of a float that is rounded to an integer, by an addition: conversions have a unit of their own, which
// is slower.
__device__ __forceinline__ unsigned eight_bit_integer(float v) {
  constexpr float LARGE = 3 << 22;  // the last bit of its mantissa counts 1
  return __float_as_uint(__fadd_rn(v, LARGE)) & 255;
}

}  // namespace kernelwright
