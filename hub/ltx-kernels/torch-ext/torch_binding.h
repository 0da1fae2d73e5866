#pragma once
#include <ATen/core/List.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

// the names of all instances
std::vector<std::string> kernels();

// Prepares a launch but for the addresses. `present`: which of the struct's leading pointers are
// set; `words`: the rest of the struct. Returns a handle for `launch`.
int64_t prepare(const std::string& kernel, int64_t grid, int64_t block, const c10::List<bool>& present,
                c10::IntArrayRef words);

// Launches on the current stream of the current device, with the addresses of the pointers present.
void launch(int64_t prepared, c10::IntArrayRef addresses);
