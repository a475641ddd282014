#include "protocol/signatures.h"

#include <stdlib.h>
#include <string.h>

/* From the latest one back: that is the one most asked for. */
static struct cl_signature *find(const struct cl_signatures *calls, uint32_t group, uint32_t sequence)
{
    for (uint32_t i = calls->count; i-- > 0;)
        if (calls->list[i].sequence == sequence && calls->list[i].group == group)
            return &calls->list[i];
    return NULL;
}

bool cl_signatures_add(struct cl_signatures *calls, uint32_t group, uint32_t sequence, uint16_t signature)
{
    if (calls->count == calls->capacity) {
        uint32_t capacity = calls->capacity ? 2 * calls->capacity : 16;
        struct cl_signature *list = realloc(calls->list, capacity * sizeof(*list));
        if (!list)
            return false;
        calls->list = list;
        calls->capacity = capacity;
    }
    calls->list[calls->count++] = (struct cl_signature){group, sequence, signature};
    return true;
}

uint16_t cl_signatures_find(const struct cl_signatures *calls, uint32_t group, uint32_t sequence)
{
    const struct cl_signature *found = find(calls, group, sequence);
    return found ? found->signature : 0;
}

void cl_signatures_remove(struct cl_signatures *calls, uint32_t group, uint32_t sequence)
{
    struct cl_signature *found = find(calls, group, sequence);
    if (!found)
        return;
    size_t after = (size_t)(calls->list + --calls->count - found);
    memmove(found, found + 1, after * sizeof(*found));
}

struct cl_signature cl_signatures_next(struct cl_signatures *calls)
{
    return calls->count ? calls->list[calls->turn++ % calls->count] : (struct cl_signature){0};
}

void cl_signatures_free(struct cl_signatures *calls)
{
    free(calls->list);
    *calls = (struct cl_signatures){0};
}
