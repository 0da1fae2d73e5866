#include "ops/row/cuda.cuh"
#include "instances.cuh"

#define ARGUMENTS kernelwright::RowArgs

#define INSTANCE(number, threads, ...) KERNEL_OF(row, number, threads, __VA_ARGS__)
#include "row.inc"
#undef INSTANCE

#define INSTANCE(number, threads, ...) ROW_OF(row, number, __VA_ARGS__)
static const Instance instances[] = {
#include "row.inc"
};

const Family ROW{instances, sizeof(instances) / sizeof(Instance), sizeof(ARGUMENTS)};
