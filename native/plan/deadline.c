#include "plan/deadline.h"

#include <stdlib.h>
#include <string.h>

void cl_deadline_add(struct cl_deadline *deadline, uint64_t took_us)
{
    deadline->took_us[deadline->count++ % CL_DEADLINE_RUNS] = took_us < UINT32_MAX ? (uint32_t)took_us : UINT32_MAX;
}

static int compare(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

uint64_t cl_deadline_us(const struct cl_deadline *deadline)
{
    uint32_t sorted[CL_DEADLINE_RUNS], runs = deadline->count < CL_DEADLINE_RUNS ? deadline->count : CL_DEADLINE_RUNS;
    if (runs < CL_DEADLINE_RUNS_LEAST)
        return 0;
    memcpy(sorted, deadline->took_us, runs * sizeof *sorted);
    qsort(sorted, runs, sizeof *sorted, compare);
    return (uint64_t)sorted[(runs - 1) * 95 / 100] * 12 / 10 + 1;
}
