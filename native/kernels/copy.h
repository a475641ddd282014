#ifndef CL_KERNELS_COPY_H
#define CL_KERNELS_COPY_H

#include <stddef.h>

/* memcpy, except that it leaves the cache alone when `length` is large (non-temporal stores to the target). For a
 * target that is neither in the cache nor read soon: else memcpy is faster. Source and target may also be the same. */
void cl_copy_stream(void *target, const void *source, size_t length);

#endif
