#include "protocol/history.h"

#include <stdlib.h>

#include "protocol/array.h"

static struct cl_history_group *look(const struct cl_history *history, uint32_t group)
{
    if (history->recent < history->count && history->groups[history->recent].group == group)
        return &history->groups[history->recent];
    for (uint32_t i = 0; i < history->count; i++)
        if (history->groups[i].group == group)
            return &history->groups[i];
    return NULL;
}

static struct cl_history_group *find(struct cl_history *history, uint32_t group)
{
    struct cl_history_group *found = look(history, group);
    if (found)
        history->recent = (uint32_t)(found - history->groups);
    return found;
}

static struct cl_history_group *find_or_add(struct cl_history *history, uint32_t group)
{
    struct cl_history_group *found = find(history, group);
    if (found)
        return found;
    if (!cl_array_reserve(&history->groups, history->count, &history->capacity, sizeof *history->groups))
        return NULL;
    history->recent = history->count++;
    history->groups[history->recent] = (struct cl_history_group){.group = group};
    return &history->groups[history->recent];
}

static uint64_t key(uint32_t sequence, uint32_t index)
{
    return (uint64_t)sequence << 32 | index;
}

/* Forgets the oldest ranges of a group, as far as no operation in flight is among them. */
static void forget(const struct cl_history *history, struct cl_history_group *group)
{
    uint64_t floor = group->finished.list[group->finished.count - CL_HISTORY_RANGES / 4 * 3].start;
    if (history->in_flight) {
        uint64_t oldest = key(cl_signatures_oldest(history->in_flight, group->group), 0);
        floor = oldest < floor ? oldest : floor;
    }
    if (floor <= group->floor)
        return;
    group->floor = floor;
    cl_ranges_drop_below(&group->finished, floor);
}

static bool add(struct cl_history *history, uint32_t group, uint64_t start, uint64_t end)
{
    struct cl_history_group *found = find_or_add(history, group);
    if (!found)
        return false;
    struct cl_ranges *finished = &found->finished;
    /* a quarter at once: moving the rest then costs little per range */
    if (finished->count >= CL_HISTORY_RANGES && finished->count % (CL_HISTORY_RANGES / 4) == 0)
        forget(history, found);
    return end <= found->floor || cl_ranges_add(finished, start, end);
}

bool cl_history_add(struct cl_history *history, const struct cl_message_id *id)
{
    if (id->group & CL_GROUP_P2P)
        return true;
    uint64_t start = key(id->sequence, id->index);
    return add(history, id->group, start, start + 1);
}

bool cl_history_add_sequence(struct cl_history *history, uint32_t group, uint32_t sequence)
{
    return add(history, group, key(sequence, 0), key(sequence, UINT32_MAX));
}

bool cl_history_contains(struct cl_history *history, const struct cl_message_id *id)
{
    const struct cl_history_group *found = find(history, id->group);
    if (id->group & CL_GROUP_P2P)
        return found && (int32_t)(id->index - cl_tags_messages(&found->posted, id->sequence)) < 0;
    uint64_t value = key(id->sequence, id->index);
    return found && (value < found->floor || cl_ranges_contains(&found->finished, value));
}

bool cl_history_add_posted(struct cl_history *history, const struct cl_message_id *id)
{
    struct cl_history_group *found = find_or_add(history, id->group);
    return found && cl_tags_add(&found->posted, id->sequence, 1);
}

uint32_t cl_history_next_index(const struct cl_history *history, uint32_t group, uint32_t tag)
{
    const struct cl_history_group *found = look(history, group);
    return found ? cl_tags_messages(&found->posted, tag) : 0;
}

void cl_history_drop_group(struct cl_history *history, uint32_t group)
{
    struct cl_history_group *found = find(history, group);
    if (!found)
        return;
    cl_ranges_free(&found->finished);
    cl_tags_free(&found->posted);
    *found = history->groups[--history->count];
}

void cl_history_free(struct cl_history *history)
{
    for (uint32_t i = 0; i < history->count; i++) {
        cl_ranges_free(&history->groups[i].finished);
        cl_tags_free(&history->groups[i].posted);
    }
    free(history->groups);
    *history = (struct cl_history){0};
}
