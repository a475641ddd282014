#include "protocol/signatures.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/array.h"

/* Searches from the latest one back, as that is the one most asked for. */
static struct cl_signature *find(const struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    for (uint32_t i = signatures->count; i-- > 0;)
        if (signatures->list[i].sequence == sequence && signatures->list[i].group == group)
            return &signatures->list[i];
    return NULL;
}

bool cl_signatures_add(struct cl_signatures *signatures, uint32_t group, uint32_t sequence, uint16_t signature)
{
    if (!cl_array_reserve(&signatures->list, signatures->count, &signatures->capacity, sizeof *signatures->list))
        return false;
    signatures->list[signatures->count++] = (struct cl_signature){group, sequence, signature};
    return true;
}

uint16_t cl_signatures_find(const struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    const struct cl_signature *found = find(signatures, group, sequence);
    return found ? found->signature : 0;
}

uint32_t cl_signatures_oldest(const struct cl_signatures *signatures, uint32_t group)
{
    uint32_t oldest = UINT32_MAX;
    for (uint32_t i = 0; i < signatures->count; i++)
        if (signatures->list[i].group == group && signatures->list[i].sequence < oldest)
            oldest = signatures->list[i].sequence;
    return oldest;
}

bool cl_signatures_any(const struct cl_signatures *signatures, uint32_t group, uint32_t first, uint32_t last)
{
    for (uint32_t i = 0; i < signatures->count; i++)
        if (signatures->list[i].group == group && signatures->list[i].sequence >= first &&
            signatures->list[i].sequence <= last)
            return true;
    return false;
}

void cl_signatures_remove(struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    struct cl_signature *found = find(signatures, group, sequence);
    if (!found)
        return;
    size_t after = (size_t)(signatures->list + --signatures->count - found);
    memmove(found, found + 1, after * sizeof(*found));
}

struct cl_signature cl_signatures_next(struct cl_signatures *signatures)
{
    return signatures->count ? signatures->list[signatures->turn++ % signatures->count] : (struct cl_signature){0};
}

void cl_signatures_free(struct cl_signatures *signatures)
{
    free(signatures->list);
    *signatures = (struct cl_signatures){0};
}
