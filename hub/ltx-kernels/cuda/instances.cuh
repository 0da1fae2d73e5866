// A family of kernels: instances of one template, each found by the text it was instantiated with.
// A family's `.inc` file lists them as INSTANCE(number, threads, template<...>), one a line.
#pragma once
#include "instances.h"

#define KERNEL_OF(family, number, threads, ...)                                     \
  __global__ void __launch_bounds__(threads)                                        \
      kernelwright_##family##_##number(const __grid_constant__ ARGUMENTS args) {    \
    __VA_ARGS__(args);                                                              \
  }
#define ROW_OF(family, number, ...) \
  {#__VA_ARGS__, reinterpret_cast<const void*>(&kernelwright_##family##_##number)},
