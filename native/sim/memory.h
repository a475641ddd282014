/*
 * Memory of the simulator. Without memory the process ends. These are not malloc, calloc and realloc, which scarcity.c
 * makes fail.
 */
#ifndef CL_SIM_MEMORY_H
#define CL_SIM_MEMORY_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void *sim_memory(void *block)
{
    if (block == NULL) {
        fputs("simulator: out of memory\n", stderr);
        exit(2);
    }
    return block;
}

static inline void *sim_resize(void *block, size_t count, size_t size)
{
    return sim_memory(reallocarray(block, count ? count : 1, size ? size : 1));
}

/* Zeroed memory; count 0 is allowed. */
static inline void *sim_new(size_t count, size_t size)
{
    return memset(sim_resize(NULL, count, size), 0, (count ? count : 1) * (size ? size : 1));
}

#endif
