/*
 * Tags: the number of messages of each tag; 0 for tags not in the map. Counts wrap.
 *
 * The map is kept as sorted runs of neighbouring tags with the same count. A few tags used again and again are a few
 * runs; tags that rise by one with every message stay a single run. Only tags with unused tags between them cost memory
 * for good, 12 bytes each.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct cl_tag_run {
    uint32_t first, last; /* both included */
    uint32_t messages;    /* messages of each of these tags */
};

struct cl_tags {
    struct cl_tag_run *runs;
    uint32_t count, capacity;
};

uint32_t cl_tags_messages(const struct cl_tags *tags, uint32_t tag);
/* False, and nothing changed, when there is no memory. */
bool cl_tags_add(struct cl_tags *tags, uint32_t tag, uint32_t messages);
void cl_tags_free(struct cl_tags *tags);
