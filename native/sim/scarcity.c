#include "sim/scarcity.h"

#include <stdlib.h>

static struct sim_scarcity *current; /* NULL: there is memory */

void sim_scarcity_set(struct sim_scarcity *scarcity, double share)
{
    current = share > 0 ? scarcity : NULL;
    if (current != NULL)
        current->share = share;
}

static bool fails(void)
{
    bool hit = current != NULL && sim_random_chance(&current->random, current->share);
    if (hit)
        current->failed++;
    return hit;
}

/* ---- the names that the linker gives (ld, --wrap) ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *block, size_t bytes)
{
    return fails() ? NULL : __real_realloc(block, bytes);
}
