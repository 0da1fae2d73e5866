#include "ops/gelu/cuda.cuh"
#include "instances.cuh"

#define ARGUMENTS kernelwright::GeluArgs

#define INSTANCE(number, threads, ...) KERNEL_OF(gelu, number, threads, __VA_ARGS__)
#include "gelu.inc"
#undef INSTANCE

#define INSTANCE(number, threads, ...) ROW_OF(gelu, number, __VA_ARGS__)
static const Instance instances[] = {
#include "gelu.inc"
};

const Family GELU{instances, sizeof(instances) / sizeof(Instance), sizeof(ARGUMENTS)};
