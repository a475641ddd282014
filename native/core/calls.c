#include "core/calls.h"

#include <stdlib.h>
#include <string.h>

/* From the latest one back: that is the one most asked for. */
static struct cl_call *find(const struct cl_calls *calls, uint32_t group, uint32_t sequence)
{
    for (uint32_t i = calls->count; i-- > 0;)
        if (calls->list[i].sequence == sequence && calls->list[i].group == group)
            return &calls->list[i];
    return NULL;
}

bool cl_calls_add(struct cl_calls *calls, uint32_t group, uint32_t sequence, uint16_t signature)
{
    if (calls->count == calls->capacity) {
        uint32_t capacity = calls->capacity ? 2 * calls->capacity : 16;
        struct cl_call *list = realloc(calls->list, capacity * sizeof(*list));
        if (!list)
            return false;
        calls->list = list;
        calls->capacity = capacity;
    }
    calls->list[calls->count++] = (struct cl_call){group, sequence, signature};
    return true;
}

uint16_t cl_calls_find(const struct cl_calls *calls, uint32_t group, uint32_t sequence)
{
    const struct cl_call *found = find(calls, group, sequence);
    return found ? found->signature : 0;
}

void cl_calls_remove(struct cl_calls *calls, uint32_t group, uint32_t sequence)
{
    struct cl_call *found = find(calls, group, sequence);
    if (!found)
        return;
    size_t after = (size_t)(calls->list + --calls->count - found);
    memmove(found, found + 1, after * sizeof(*found));
}

struct cl_call cl_calls_next(struct cl_calls *calls)
{
    return calls->count ? calls->list[calls->turn++ % calls->count] : (struct cl_call){0};
}

void cl_calls_free(struct cl_calls *calls)
{
    free(calls->list);
    *calls = (struct cl_calls){0};
}
