/*
 * Memory of the simulator. Without memory the process ends.
 */
#ifndef CL_SIM_MEMORY_H
#define CL_SIM_MEMORY_H

#include <stdio.h>
#include <stdlib.h>

static inline void *sim_memory(void *block)
{
    if (block == NULL) {
        fputs("simulator: out of memory\n", stderr);
        exit(2);
    }
    return block;
}

/* Zeroed memory; count 0 is allowed. */
static inline void *sim_new(size_t count, size_t size)
{
    return sim_memory(calloc(count ? count : 1, size ? size : 1));
}

static inline void *sim_resize(void *block, size_t count, size_t size)
{
    return sim_memory(realloc(block, (count ? count : 1) * size));
}

#endif
