#pragma once
#include <ATen/core/List.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

// the names of all instances
std::vector<std::string> kernels();

// An instance with everything about its launch but the addresses: `present` says which of the
// struct's leading pointers there are, `words` is what follows them. Returns a number for `launch`.
int64_t prepare(const std::string& kernel, int64_t grid, int64_t block, const c10::List<bool>& present,
                c10::IntArrayRef words);

// Launches on the current stream of the current device; `addresses` are those that are present.
void launch(int64_t prepared, c10::IntArrayRef addresses);
