#include "protocol/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/array.h"

static void remove_at(struct cl_ranges *ranges, uint32_t at, uint32_t how_many)
{
    memmove(ranges->list + at, ranges->list + at + how_many, (ranges->count - at - how_many) * sizeof(*ranges->list));
    ranges->count -= how_many;
}

bool cl_ranges_add(struct cl_ranges *ranges, uint64_t start, uint64_t end)
{
    if (start >= end)
        return true;
    /* `at` becomes the first range that is not wholly below `start`; searched from the top, where additions happen */
    uint32_t at = ranges->count;
    while (at > 0 && ranges->list[at - 1].end >= start)
        at--;
    if (at == ranges->count || ranges->list[at].start > end) {
        if (!cl_array_reserve(&ranges->list, ranges->count, &ranges->capacity, sizeof *ranges->list))
            return false;
        memmove(ranges->list + at + 1, ranges->list + at, (ranges->count - at) * sizeof(*ranges->list));
        ranges->list[at] = (struct cl_range){start, end};
        ranges->count++;
        return true;
    }
    struct cl_range *grown = &ranges->list[at];
    if (start < grown->start)
        grown->start = start;
    if (end > grown->end)
        grown->end = end;
    uint32_t swallowed = 0;
    while (at + 1 + swallowed < ranges->count && ranges->list[at + 1 + swallowed].start <= grown->end) {
        if (ranges->list[at + 1 + swallowed].end > grown->end)
            grown->end = ranges->list[at + 1 + swallowed].end;
        swallowed++;
    }
    if (swallowed)
        remove_at(ranges, at + 1, swallowed);
    return true;
}

bool cl_ranges_contains(const struct cl_ranges *ranges, uint64_t value)
{
    uint32_t low = 0, high = ranges->count; /* the first range that ends above `value` is in [low, high] */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ranges->list[middle].end <= value)
            low = middle + 1;
        else
            high = middle;
    }
    return low < ranges->count && ranges->list[low].start <= value;
}

bool cl_ranges_pop(struct cl_ranges *ranges, uint64_t *value)
{
    if (!ranges->count)
        return false;
    *value = ranges->list[0].start++;
    if (ranges->list[0].start == ranges->list[0].end)
        remove_at(ranges, 0, 1);
    return true;
}

void cl_ranges_drop_below(struct cl_ranges *ranges, uint64_t value)
{
    uint32_t gone = 0;
    while (gone < ranges->count && ranges->list[gone].end <= value)
        gone++;
    if (gone)
        remove_at(ranges, 0, gone);
    if (ranges->count && ranges->list[0].start < value)
        ranges->list[0].start = value;
}

void cl_ranges_free(struct cl_ranges *ranges)
{
    free(ranges->list);
    *ranges = (struct cl_ranges){0};
}
