/*
 * Element: small whole numbers as elements of every dtype, written and reduced without the kernels. Their sums and
 * products are exact in any order, so every result is either right or wrong.
 */
#ifndef CL_SIM_ELEMENT_H
#define CL_SIM_ELEMENT_H

#include <stdbool.h>
#include <stddef.h>

#include "commlayer.h"

enum { SIM_SMALL = 100 /* the largest contribution */ };

/* Values of floats that are NaN: a quiet one, and one with the lowest bit of the payload only. */
#define SIM_NAN INT64_MIN
#define SIM_NAN_LOW (INT64_MIN + 1)

bool sim_element_is_float(enum cl_dtype dtype);
/* The contribution of one of `ranks` ranks at `index`, from a hash of the three numbers. */
int64_t sim_element_value(enum cl_dtype dtype, enum cl_op op, uint32_t ranks, uint32_t rank, uint64_t seed,
                          uint64_t index);
/* left (op) right, in the width of the dtype. */
int64_t sim_element_reduce(enum cl_dtype dtype, enum cl_op op, int64_t left, int64_t right);
/* Writes value / divisor: rounded to nearest even for floats, towards zero for integers. */
void sim_element_write(enum cl_dtype dtype, void *to, int64_t value, uint32_t divisor);
/* The n-th dtype of this size. */
enum cl_dtype sim_element_dtype(uint32_t itemsize, uint64_t n);
/* The n-th floating-point dtype of this size: 2, 4 or 8 bytes. */
enum cl_dtype sim_element_float(uint32_t itemsize, uint64_t n);
/* The first of `bytes` bytes that differ, as elements: every NaN equals every other; `bytes`: none. */
uint64_t sim_element_difference(enum cl_dtype dtype, const uint8_t *left, const uint8_t *right, uint64_t bytes);
const char *sim_element_name(enum cl_dtype dtype);

#endif
