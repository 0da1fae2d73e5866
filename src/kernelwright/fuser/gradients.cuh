// Gradients of activations, in the order of ATen's CUDA kernels. The compiler contracts products and
// sums here as it does there, so the expressions must stay as they are.
#pragma once

namespace kernelwright {

__device__ __forceinline__ float silu_backward(float dy, float x) {
  const float s = 1.f / (1.f + expf(-x));
  return dy * s * (1.f + x * (1.f - s));
}

__device__ __forceinline__ float gelu_tanh_backward(float dy, float x) {
  constexpr float BETA = 1.41421356237309504880 * 1.12837916709551257390 * 0.5, KAPPA = 0.044715;
  const float square = x * x;
  const float cube = square * x;
  const float t = tanhf(BETA * (x + KAPPA * cube));
  const float left = 0.5f * x;
  const float right = 1.f + t;
  const float left_derivative = 0.5f * right;
  const float tanh_derivative = 1.f - t * t;
  const float inner_derivative = BETA * (1.f + 3.f * KAPPA * square);
  const float right_derivative = left * tanh_derivative * inner_derivative;
  return dy * (left_derivative + right_derivative);
}

__device__ __forceinline__ float gelu_erf_backward(float dy, float x) {
  constexpr float BETA = 1.12837916709551257390 * 0.70710678118654752440 * 0.5;
  constexpr float ALPHA = 0.70710678118654752440;
  const float cdf = 0.5f * (1.f + erff(x * ALPHA));
  const float pdf = expf(-0.5f * x * x) * BETA;
  return dy * (cdf + x * pdf);
}

}  // namespace kernelwright
