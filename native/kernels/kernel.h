/* Kernel: functions over arrays of elements. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* target[i] = target[i] (op) source[i]. */
typedef void (*cl_reduce_fn)(void *target, const void *source, size_t count);

/* target[i] = target[i] / divisor; integers truncate toward zero. The divisor is at least 1. */
typedef void (*cl_scale_fn)(void *target, size_t count, uint32_t divisor);
