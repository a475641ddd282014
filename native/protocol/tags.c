#include "protocol/tags.h"

#include <stdlib.h>
#include <string.h>

/* The first run that does not end before the tag; tags->count when there is none. */
static uint32_t find(const struct cl_tags *tags, uint32_t tag)
{
    uint32_t low = 0, high = tags->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (tags->runs[middle].last < tag)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool covers(const struct cl_tags *tags, uint32_t at, uint32_t tag)
{
    return at < tags->count && tags->runs[at].first <= tag;
}

uint32_t cl_tags_messages(const struct cl_tags *tags, uint32_t tag)
{
    uint32_t at = find(tags, tag);
    return covers(tags, at, tag) ? tags->runs[at].messages : 0;
}

static bool reserve(struct cl_tags *tags, uint32_t capacity)
{
    if (capacity <= tags->capacity)
        return true;
    capacity = capacity < 2 * tags->capacity ? 2 * tags->capacity : capacity;
    struct cl_tag_run *runs = realloc(tags->runs, capacity * sizeof(*runs));
    if (runs == NULL)
        return false;
    tags->runs = runs;
    tags->capacity = capacity;
    return true;
}

static void insert(struct cl_tags *tags, uint32_t at, struct cl_tag_run run)
{
    memmove(tags->runs + at + 1, tags->runs + at, (tags->count++ - at) * sizeof(*tags->runs));
    tags->runs[at] = run;
}

/* Joins run `at` to the run before it, if they are neighbours with the same count. */
static void join(struct cl_tags *tags, uint32_t at)
{
    if (at == 0 || at >= tags->count)
        return;
    struct cl_tag_run *left = &tags->runs[at - 1], *right = &tags->runs[at];
    if (left->messages != right->messages || left->last + 1 != right->first)
        return;
    left->last = right->last;
    memmove(right, right + 1, (--tags->count - at) * sizeof(*right));
}

bool cl_tags_add(struct cl_tags *tags, uint32_t tag, uint32_t messages)
{
    if (!reserve(tags, tags->count + 2))
        return false;
    uint32_t at = find(tags, tag);
    if (!covers(tags, at, tag)) {
        insert(tags, at, (struct cl_tag_run){tag, tag, 0});
    } else {
        struct cl_tag_run run = tags->runs[at];
        if (run.last > tag) {
            insert(tags, at + 1, (struct cl_tag_run){tag + 1, run.last, run.messages});
            tags->runs[at].last = tag;
        }
        if (run.first < tag) {
            tags->runs[at].last = tag - 1;
            insert(tags, ++at, (struct cl_tag_run){tag, tag, run.messages});
        }
    }
    tags->runs[at].messages += messages;
    join(tags, at + 1);
    join(tags, at);
    return true;
}

void cl_tags_free(struct cl_tags *tags)
{
    free(tags->runs);
    *tags = (struct cl_tags){0};
}
