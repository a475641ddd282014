#include "protocol/closed_groups.h"

#include <stddef.h>

bool cl_closed_groups_add(struct cl_closed_groups *closed, uint32_t group, int32_t reason, uint16_t culprit)
{
    if (cl_closed_groups_find(closed, group) != NULL)
        return false;
    uint32_t at = closed->count;
    if (at == CL_CLOSED_GROUPS_MAX) {
        at = closed->oldest;
        closed->oldest = (at + 1) % CL_CLOSED_GROUPS_MAX;
        closed->untold_count -= closed->untold[at];
    } else {
        closed->count++;
    }
    closed->list[at] = (struct cl_closed_group){group, reason, culprit};
    closed->untold[at] = false;
    return true;
}

const struct cl_closed_group *cl_closed_groups_find(const struct cl_closed_groups *closed, uint32_t group)
{
    for (uint32_t i = 0; i < closed->count; i++)
        if (closed->list[i].group == group)
            return &closed->list[i];
    return NULL;
}

void cl_closed_groups_report(struct cl_closed_groups *closed, uint32_t group)
{
    const struct cl_closed_group *found = cl_closed_groups_find(closed, group);
    if (found == NULL || closed->untold[found - closed->list])
        return;
    closed->untold[found - closed->list] = true;
    closed->untold_count++;
}

bool cl_closed_groups_next_report(struct cl_closed_groups *closed, struct cl_closed_group *group)
{
    if (!closed->untold_count)
        return false;
    uint32_t at = closed->oldest;
    while (!closed->untold[at])
        at = (at + 1) % CL_CLOSED_GROUPS_MAX;
    closed->untold[at] = false;
    closed->untold_count--;
    *group = closed->list[at];
    return true;
}
