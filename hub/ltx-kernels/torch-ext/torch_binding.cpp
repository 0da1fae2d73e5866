// The ops of the library. They take addresses, not tensors: the op in Python has checked its tensors,
// keeps them alive, and keeps one prepared launch for each signature.
#include "torch_binding.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "families.h"
#include "registration.h"

namespace {

constexpr std::size_t MAX_BYTES = 512;

struct Prepared {
  const void* kernel;
  unsigned grid, block;
  std::vector<unsigned> slots;  // which pointers of the struct are filled in
  alignas(16) char arguments[MAX_BYTES];
};

const std::unordered_map<std::string, const Instance*>& table() {
  static const auto all = [] {
    std::unordered_map<std::string, const Instance*> found;
    for (const Family* family : FAMILIES)
      for (std::size_t i = 0; i < family->count; i++)
        found[family->first[i].name] = &family->first[i];
    return found;
  }();
  return all;
}

}  // namespace

std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (const auto& entry : table()) names.push_back(entry.first);
  return names;
}

int64_t prepare(const std::string& kernel, int64_t grid, int64_t block, const c10::List<bool>& present,
                c10::IntArrayRef words) {
  const auto found = table().find(kernel);
  TORCH_CHECK(found != table().end(), "no such kernel: ", kernel);
  const Instance& instance = *found->second;
  const std::size_t head = present.size() * sizeof(void*), tail = words.size() * sizeof(int64_t);
  const std::size_t bytes = instance.bytes;
  // `words` are whole: the last one may be four bytes longer than the struct
  TORCH_CHECK(head + tail >= bytes && head + tail - bytes < 8 && head + tail <= MAX_BYTES, kernel,
              " takes ", bytes, " bytes, not ", head + tail);
  // loads the kernel now: loading it in a graph's capture would break the capture
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, instance.kernel));
  // never freed: a plan in Python keeps this address for the life of the process
  auto* made = new Prepared{instance.kernel, unsigned(grid), unsigned(block), {}, {}};
  for (unsigned i = 0; i < present.size(); i++)
    if (present.get(i)) made->slots.push_back(i);
  std::memcpy(made->arguments + head, words.data(), tail);
  return reinterpret_cast<int64_t>(made);
}

void launch(int64_t prepared, c10::IntArrayRef addresses) {
  const Prepared& made = *reinterpret_cast<const Prepared*>(prepared);
  TORCH_CHECK(addresses.size() == made.slots.size(), "launch: ", addresses.size(), " addresses, expected ",
              made.slots.size());
  alignas(16) char arguments[MAX_BYTES];
  std::memcpy(arguments, made.arguments, MAX_BYTES);
  for (std::size_t i = 0; i < addresses.size(); i++)
    std::memcpy(arguments + made.slots[i] * sizeof(void*), &addresses[i], sizeof(void*));
  void* parameters[] = {arguments};
  C10_CUDA_CHECK(cudaLaunchKernel(made.kernel, dim3(made.grid), dim3(made.block), parameters, 0,
                                  c10::cuda::getCurrentCUDAStream()));
}

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("kernels() -> str[]", &kernels);
  ops.def("prepare(str kernel, int grid, int block, bool[] present, int[] words) -> int", &prepare);
  ops.def("launch(int prepared, int[] addresses) -> ()", &launch);
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
