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
    if (found != NULL)
        history->recent = (uint32_t)(found - history->groups);
    return found;
}

static struct cl_history_group *find_or_add(struct cl_history *history, uint32_t group)
{
    struct cl_history_group *found = find(history, group);
    if (found != NULL)
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

/* Closes the gaps between ranges below `end` in which no operation in flight lies: of what was begun before a finished
 * message, all else is finished. */
static void close_gaps(const struct cl_signatures *in_flight, struct cl_history_group *group, uint64_t end)
{
    struct cl_ranges *finished = &group->finished;
    uint32_t kept = 0;
    for (uint32_t i = 1; i < finished->count; i++) {
        struct cl_range *last = &finished->list[kept], next = finished->list[i];
        uint32_t from = (uint32_t)(last->end >> 32), to = (uint32_t)(next.start >> 32);
        if (next.start < end && !cl_signatures_any(in_flight, group->group, from, to))
            last->end = next.end;
        else
            finished->list[++kept] = next;
    }
    finished->count = kept + 1;
}

/* Forgets the oldest ranges of a group, as far as no operation in flight is among them, and merges those that follow.
 */
static void forget(const struct cl_history *history, struct cl_history_group *group)
{
    uint64_t end = group->finished.list[group->finished.count - CL_HISTORY_RANGES / 4 * 3].start, floor = end;
    if (history->in_flight != NULL) {
        uint64_t oldest = key(cl_signatures_oldest(history->in_flight, group->group), 0);
        floor = oldest < floor ? oldest : floor;
    }
    if (floor > group->floor) {
        group->floor = floor;
        cl_ranges_drop_below(&group->finished, floor);
    }
    if (floor < end)
        close_gaps(history->in_flight, group, end);
}

static bool add(struct cl_history *history, uint32_t group, uint64_t start, uint64_t end)
{
    struct cl_history_group *found = find_or_add(history, group);
    if (found == NULL)
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
    return add(history, group, key(sequence, 0), key(sequence + 1, 0));
}

bool cl_history_contains(struct cl_history *history, const struct cl_message_id *id)
{
    const struct cl_history_group *found = find(history, id->group);
    if (id->group & CL_GROUP_P2P)
        return found != NULL && (int32_t)(id->index - cl_tags_messages(&found->posted, id->sequence)) < 0;
    uint64_t value = key(id->sequence, id->index);
    return found != NULL && (value < found->floor || cl_ranges_contains(&found->finished, value));
}

bool cl_history_add_posted(struct cl_history *history, const struct cl_message_id *id)
{
    struct cl_history_group *found = find_or_add(history, id->group);
    return found != NULL && cl_tags_add(&found->posted, id->sequence, 1);
}

uint32_t cl_history_next_index(const struct cl_history *history, uint32_t group, uint32_t tag)
{
    const struct cl_history_group *found = look(history, group);
    return found != NULL ? cl_tags_messages(&found->posted, tag) : 0;
}

void cl_history_drop_group(struct cl_history *history, uint32_t group)
{
    struct cl_history_group *found = find(history, group);
    if (found == NULL)
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
