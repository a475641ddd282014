#pragma once

#include <stddef.h>
#include <stdint.h>

enum { CL_PREFETCH_LINE_BYTES = 64 };

/* Has memory that is written soon come into the cache, while the thread goes on. Any address will do. */
static inline void cl_prefetch(uintptr_t address, size_t length)
{
    for (uintptr_t end = address + length; address < end; address += CL_PREFETCH_LINE_BYTES)
        __builtin_prefetch((const void *)address, 1);
}
