#include "ops/glu/cuda.cuh"
#include "instances.cuh"

#define ARGUMENTS kernelwright::GluArgs

#define INSTANCE(number, threads, ...) KERNEL_OF(glu, number, threads, __VA_ARGS__)
#include "glu.inc"
#undef INSTANCE

#define INSTANCE(number, threads, ...) ROW_OF(glu, number, __VA_ARGS__)
static const Instance instances[] = {
#include "glu.inc"
};

const Family GLU{instances, sizeof(instances) / sizeof(Instance), sizeof(ARGUMENTS)};
