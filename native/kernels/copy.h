#pragma once

#include <stddef.h>

/* Copies like memcpy, but leaves the cache alone if `length` is large (non-temporal stores). It is for targets that are
 * neither in the cache nor read soon; for others memcpy is faster. Source and target may be the same. */
void cl_copy_stream(void *target, const void *source, size_t length);
