#include "protocol/closed_groups.h"

#include <stdlib.h>

bool cl_closed_groups_add(struct cl_closed_groups *closed, uint32_t group, int32_t reason, uint16_t culprit)
{
    if (cl_closed_groups_find(closed, group))
        return false;
    if (closed->count == CL_CLOSED_GROUPS_MAX) {
        closed->list[closed->oldest++ % CL_CLOSED_GROUPS_MAX] = (struct cl_closed_group){group, reason, culprit};
        return true;
    }
    if (closed->count == closed->capacity) {
        uint32_t capacity = closed->capacity ? 2 * closed->capacity : 8;
        struct cl_closed_group *list = realloc(closed->list, capacity * sizeof(*list));
        if (!list)
            return true;
        closed->list = list;
        closed->capacity = capacity;
    }
    closed->list[closed->count++] = (struct cl_closed_group){group, reason, culprit};
    return true;
}

const struct cl_closed_group *cl_closed_groups_find(const struct cl_closed_groups *closed, uint32_t group)
{
    for (uint32_t i = 0; i < closed->count; i++)
        if (closed->list[i].group == group)
            return &closed->list[i];
    return NULL;
}

void cl_closed_groups_free(struct cl_closed_groups *closed)
{
    free(closed->list);
    *closed = (struct cl_closed_groups){0};
}
