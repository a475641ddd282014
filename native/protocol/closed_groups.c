#include "protocol/closed_groups.h"

#include <stdlib.h>

bool cl_closed_groups_add(struct cl_closed_groups *retired, uint32_t group, int32_t reason, uint16_t blame)
{
    if (cl_closed_groups_find(retired, group))
        return false;
    if (retired->count == CL_CLOSED_GROUPS_MAX) {
        retired->list[retired->oldest++ % CL_CLOSED_GROUPS_MAX] = (struct cl_closed_group){group, reason, blame};
        return true;
    }
    if (retired->count == retired->capacity) {
        uint32_t capacity = retired->capacity ? 2 * retired->capacity : 8;
        struct cl_closed_group *list = realloc(retired->list, capacity * sizeof(*list));
        if (!list)
            return true;
        retired->list = list;
        retired->capacity = capacity;
    }
    retired->list[retired->count++] = (struct cl_closed_group){group, reason, blame};
    return true;
}

const struct cl_closed_group *cl_closed_groups_find(const struct cl_closed_groups *retired, uint32_t group)
{
    for (uint32_t i = 0; i < retired->count; i++)
        if (retired->list[i].group == group)
            return &retired->list[i];
    return NULL;
}

void cl_closed_groups_free(struct cl_closed_groups *retired)
{
    free(retired->list);
    *retired = (struct cl_closed_groups){0};
}
