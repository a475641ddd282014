/*
 * Select: the values of largest magnitude, exactly. Of equal magnitudes those at lower indices come first. All NaNs are
 * equal and larger than infinity, so that an overflow shows in the selection.
 *
 * The values are read twice: once to count magnitudes by their upper bits, once to collect. If more than 16,384 values
 * are about as large as the k-th, one or two more reads tell them apart. A call needs 512 KiB of stack.
 */
#ifndef CL_KERNELS_SELECT_H
#define CL_KERNELS_SELECT_H

#include <stddef.h>
#include <stdint.h>

/* Writes `k` indices in ascending order, and the values there. k <= count < 2^32. */
void cl_select_largest(const float *values, size_t count, size_t k, uint32_t *indices, float *chosen);

#endif
