#pragma once

#include <stddef.h>
#include <stdint.h>

enum { CL_PREFETCH_LINE_BYTES = 64 };

/* Prefetches memory that this thread will write soon, but for the last cache line if the address is not at the start of
 * one. The address may be invalid: a prefetch does not fault. */
static inline void cl_prefetch(uintptr_t address, size_t length)
{
    for (uintptr_t end = address + length; address < end; address += CL_PREFETCH_LINE_BYTES)
        __builtin_prefetch((const void *)address, 1);
}
