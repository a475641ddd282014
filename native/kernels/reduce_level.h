/* Reduce level: the kernels of one instruction-set level; private to the kernels. */
#ifndef CL_KERNELS_REDUCE_LEVEL_H
#define CL_KERNELS_REDUCE_LEVEL_H

#include "commlayer.h"
#include "kernels/kernel.h"

#define CL_DTYPES 12
#define CL_OPS 7

struct cl_reduce_level {
    const char *name;
    cl_reduce_fn reduce[CL_DTYPES][CL_OPS];
    cl_scale_fn scale[CL_DTYPES];
};

extern const struct cl_reduce_level cl_reduce_scalar;
#if defined(__x86_64__)
extern const struct cl_reduce_level cl_reduce_avx2;
extern const struct cl_reduce_level cl_reduce_avx512;
#endif

#endif
