/*
 * Ranges: a set of integers kept as sorted, disjoint, non-adjacent half-open ranges. Made for sets that are nearly
 * contiguous and grow at the top: adding there is O(1), elsewhere O(count). A zeroed struct is the empty set.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "commlayer.h"

struct cl_ranges {
    struct cl_range *list;
    uint32_t count;
    uint32_t capacity;
};

/* False, and the set unchanged, when there is no memory. Empty ranges are ignored. */
bool cl_ranges_add(struct cl_ranges *ranges, uint64_t start, uint64_t end);
bool cl_ranges_contains(const struct cl_ranges *ranges, uint64_t value);
/* Takes the lowest value out of the set. False when it is empty. */
bool cl_ranges_pop(struct cl_ranges *ranges, uint64_t *value);
void cl_ranges_drop_below(struct cl_ranges *ranges, uint64_t value);
/* Empties the set but keeps its memory for the next use. */
static inline void cl_ranges_clear(struct cl_ranges *ranges)
{
    ranges->count = 0;
}
void cl_ranges_free(struct cl_ranges *ranges);
