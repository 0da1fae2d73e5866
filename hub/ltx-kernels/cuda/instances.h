// What the torch ops see of the kernels. No torch, no CUDA: both sides include it.
#pragma once
#include <cstddef>

struct Instance {
  const char* name;    // as CudaLaunch.template writes it
  const void* kernel;  // a __global__ function that takes one struct
  std::size_t bytes;   // of that struct
};

// all kernels of one op folder
struct Family {
  const Instance* first;
  std::size_t count;
};
