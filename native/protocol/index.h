/*
 * Index: finds things by a number that is made of their name. The things hold their places in it; a thing is in one
 * index at most per place. Things with equal numbers are found one after another, the latest first.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* All zero: in no index. */
struct cl_index_place {
    struct cl_index_place *next, **link; /* in its bucket */
    uint64_t key;
};

/* All zero: empty. */
struct cl_index {
    struct cl_index_place **buckets;
    uint32_t bucket_count; /* a power of two */
    uint32_t count;
};

/* The thing of which `place` is the member `field`. */
#define CL_INDEX_THING(place, type, field) ((type *)(void *)((char *)(place)-offsetof(type, field)))

/* Mixes a number so that each of its bits changes half of the others; different numbers stay different. */
static inline uint64_t cl_index_mix(uint64_t number)
{
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCDu;
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53u;
    return number ^ number >> 33;
}

/* The key of an operation: operations have different ones. */
static inline uint64_t cl_index_operation(uint32_t group, uint32_t sequence)
{
    return cl_index_mix((uint64_t)group << 32 | sequence);
}

/* Adds a place under a key that cl_index_mix has made. False, and nothing changed, when there is no memory. */
bool cl_index_add(struct cl_index *index, struct cl_index_place *place, uint64_t key);
/* A place in no index stays as it is. */
void cl_index_remove(struct cl_index *index, struct cl_index_place *place);
/* The first place under the key, and the next one; NULL: there is none. */
struct cl_index_place *cl_index_find(const struct cl_index *index, uint64_t key);
struct cl_index_place *cl_index_next(const struct cl_index_place *place);
void cl_index_free(struct cl_index *index);
