#include "protocol/signatures.h"

#include <stdlib.h>

struct cl_signature_entry {
    struct cl_signature value;
    struct cl_index_place place; /* under its operation */
    struct cl_signature_entry *previous, *next;
};

/* Finds the latest one. */
static struct cl_signature_entry *find(const struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    struct cl_index_place *place = cl_index_find(&signatures->operations, cl_index_operation(group, sequence));
    return place != NULL ? CL_INDEX_THING(place, struct cl_signature_entry, place) : NULL;
}

bool cl_signatures_add(struct cl_signatures *signatures, uint32_t group, uint32_t sequence, uint16_t signature)
{
    struct cl_signature_entry *entry = malloc(sizeof *entry);
    if (entry == NULL)
        return false;
    *entry = (struct cl_signature_entry){.value = {group, sequence, signature}, .previous = signatures->last};
    if (!cl_index_add(&signatures->operations, &entry->place, cl_index_operation(group, sequence))) {
        free(entry);
        return false;
    }
    *(signatures->last != NULL ? &signatures->last->next : &signatures->first) = entry;
    signatures->last = entry;
    return true;
}

uint16_t cl_signatures_find(const struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    const struct cl_signature_entry *found = find(signatures, group, sequence);
    return found != NULL ? found->value.signature : 0;
}

uint32_t cl_signatures_oldest(const struct cl_signatures *signatures, uint32_t group)
{
    uint32_t oldest = UINT32_MAX;
    for (const struct cl_signature_entry *entry = signatures->first; entry != NULL; entry = entry->next)
        if (entry->value.group == group && entry->value.sequence < oldest)
            oldest = entry->value.sequence;
    return oldest;
}

bool cl_signatures_any(const struct cl_signatures *signatures, uint32_t group, uint32_t first, uint32_t last)
{
    if (last - first < signatures->operations.count) { /* fewer to look up than there are */
        while (first != last && find(signatures, group, first) == NULL)
            first++;
        return find(signatures, group, first) != NULL;
    }
    for (const struct cl_signature_entry *entry = signatures->first; entry != NULL; entry = entry->next)
        if (entry->value.group == group && entry->value.sequence >= first && entry->value.sequence <= last)
            return true;
    return false;
}

static void remove_entry(struct cl_signatures *signatures, struct cl_signature_entry *entry)
{
    if (signatures->turn == entry)
        signatures->turn = entry->next;
    *(entry->previous != NULL ? &entry->previous->next : &signatures->first) = entry->next;
    *(entry->next != NULL ? &entry->next->previous : &signatures->last) = entry->previous;
    cl_index_remove(&signatures->operations, &entry->place);
    free(entry);
}

void cl_signatures_remove(struct cl_signatures *signatures, uint32_t group, uint32_t sequence)
{
    struct cl_signature_entry *found = find(signatures, group, sequence);
    if (found != NULL)
        remove_entry(signatures, found);
}

struct cl_signature cl_signatures_next(struct cl_signatures *signatures)
{
    const struct cl_signature_entry *entry = signatures->turn != NULL ? signatures->turn : signatures->first;
    if (entry == NULL)
        return (struct cl_signature){0};
    signatures->turn = entry->next;
    return entry->value;
}

void cl_signatures_free(struct cl_signatures *signatures)
{
    while (signatures->first != NULL)
        remove_entry(signatures, signatures->first);
    cl_index_free(&signatures->operations);
}
