/*
 * Reduce: element-wise reductions and scaling of plain memory. The process chooses a variant at run time (AVX-512,
 * AVX2, scalar). All variants give the same bits for the same input, except the payload and sign of NaN.
 *
 * Pointers need no alignment: packets put elements at odd addresses. Ranges either coincide or do not overlap. count 0
 * is allowed. f16 and bf16 are computed in f32 and rounded to nearest even on each call; integers wrap. MIN and MAX
 * propagate NaN (as torch.minimum/maximum do); of 0 and -0 they give the source's.
 */
#pragma once

#include "commlayer.h"
#include "kernels/kernel.h"

/* NULL when dtype or op is out of range, and for bitwise operators on floats. */
cl_reduce_fn cl_reduce_kernel(enum cl_dtype dtype, enum cl_op op);
cl_scale_fn cl_scale_kernel(enum cl_dtype dtype);

/* Bytes per element; 0 when out of range. */
size_t cl_dtype_size(enum cl_dtype dtype);
