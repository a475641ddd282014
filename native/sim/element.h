/*
 * Element: small whole numbers as elements of every dtype, written and reduced without the kernels. Their sums and
 * products are exact in any order, so a result is right or it is not.
 */
#ifndef CL_SIM_ELEMENT_H
#define CL_SIM_ELEMENT_H

#include <stddef.h>

#include "commlayer.h"

/* The contribution of one of `ranks` ranks at `index`, from a hash of the three numbers. */
int64_t sim_element_value(enum cl_dtype dtype, enum cl_op op, uint32_t ranks, uint32_t rank, uint64_t seed,
                          uint64_t index);
/* left (op) right, as wide as the dtype is. */
int64_t sim_element_reduce(enum cl_dtype dtype, enum cl_op op, int64_t left, int64_t right);
/* Writes value / divisor: rounded to nearest even for floats, towards zero for integers. */
void sim_element_write(enum cl_dtype dtype, void *to, int64_t value, uint32_t divisor);
/* A dtype of this size, the n-th of them. */
enum cl_dtype sim_element_dtype(uint32_t itemsize, uint64_t n);
/* The same, of floats only, of which there are some with 2, 4 and 8 bytes. */
enum cl_dtype sim_element_float(uint32_t itemsize, uint64_t n);
const char *sim_element_name(enum cl_dtype dtype);

#endif
