#include "ops/rope/cuda.cuh"
#include "instances.cuh"

#define ARGUMENTS kernelwright::RopeArgs

#define INSTANCE(number, threads, ...) KERNEL_OF(rope, number, threads, __VA_ARGS__)
#include "rope.inc"
#undef INSTANCE

#define INSTANCE(number, threads, ...) ROW_OF(rope, number, __VA_ARGS__)
static const Instance instances[] = {
#include "rope.inc"
};

const Family ROPE{instances, sizeof(instances) / sizeof(Instance), sizeof(ARGUMENTS)};
