#include "protocol/closed_groups.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/array.h"

bool cl_closed_groups_add(struct cl_closed_groups *closed, uint32_t group, int32_t reason, uint16_t culprit)
{
    if (cl_closed_groups_find(closed, group) != NULL)
        return false;
    if (closed->count == CL_CLOSED_GROUPS_MAX) {
        closed->list[closed->oldest++ % CL_CLOSED_GROUPS_MAX] = (struct cl_closed_group){group, reason, culprit};
        return true;
    }
    if (!cl_array_reserve(&closed->list, closed->count, &closed->capacity, sizeof *closed->list))
        return true;
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

void cl_closed_groups_report(struct cl_closed_groups *closed, const struct cl_closed_group *group)
{
    if (!cl_array_reserve(&closed->reports, closed->report_count, &closed->report_capacity, sizeof *closed->reports))
        return;
    closed->reports[closed->report_count++] = *group;
}

bool cl_closed_groups_next_report(struct cl_closed_groups *closed, struct cl_closed_group *group)
{
    if (!closed->report_count)
        return false;
    *group = closed->reports[0];
    memmove(closed->reports, closed->reports + 1, --closed->report_count * sizeof(*closed->reports));
    return true;
}

void cl_closed_groups_free(struct cl_closed_groups *closed)
{
    free(closed->list);
    free(closed->reports);
    *closed = (struct cl_closed_groups){0};
}
