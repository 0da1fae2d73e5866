// Compiles one family: a __global__ function for each instance, and a table that finds it by the
// text of its template. The generated .cu file that includes this defines FAMILY, and INSTANCES as
// the generated file with one line for each: INSTANCE(number, threads, arguments, template<...>).
#include "families.h"

#define JOINED(prefix, family, suffix) prefix##_##family##suffix
#define JOIN(prefix, family, suffix) JOINED(prefix, family, suffix)

#define INSTANCE(number, threads, arguments, ...)                                          \
  __global__ void __launch_bounds__(threads)                                               \
      JOIN(kernelwright, FAMILY, _##number)(const __grid_constant__ arguments args) {      \
    __VA_ARGS__(args);                                                                     \
  }
#include INSTANCES
#undef INSTANCE

#define INSTANCE(number, threads, arguments, ...)                                          \
  {#__VA_ARGS__, reinterpret_cast<const void*>(&JOIN(kernelwright, FAMILY, _##number)),    \
   sizeof(arguments)},
static const Instance JOIN(instances, FAMILY, )[] = {
#include INSTANCES
};
#undef INSTANCE

const Family JOIN(family, FAMILY, ){
    JOIN(instances, FAMILY, ), sizeof(JOIN(instances, FAMILY, )) / sizeof(Instance)};
