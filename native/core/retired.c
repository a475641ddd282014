#include "core/retired.h"

#include <stdlib.h>

bool cl_retired_add(struct cl_retired *retired, uint32_t group, int32_t reason, uint16_t blame)
{
    if (cl_retired_find(retired, group))
        return false;
    if (retired->count == CL_RETIRED_MAX) {
        retired->list[retired->oldest++ % CL_RETIRED_MAX] = (struct cl_retired_group){group, reason, blame};
        return true;
    }
    if (retired->count == retired->capacity) {
        uint32_t capacity = retired->capacity ? 2 * retired->capacity : 8;
        struct cl_retired_group *list = realloc(retired->list, capacity * sizeof(*list));
        if (!list)
            return true;
        retired->list = list;
        retired->capacity = capacity;
    }
    retired->list[retired->count++] = (struct cl_retired_group){group, reason, blame};
    return true;
}

const struct cl_retired_group *cl_retired_find(const struct cl_retired *retired, uint32_t group)
{
    for (uint32_t i = 0; i < retired->count; i++)
        if (retired->list[i].group == group)
            return &retired->list[i];
    return NULL;
}

void cl_retired_free(struct cl_retired *retired)
{
    free(retired->list);
    *retired = (struct cl_retired){0};
}
