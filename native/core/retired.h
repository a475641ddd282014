/*
 * Retired: the groups that ended here, and why: closed (reason 0) or aborted (a negative enum cl_error). Packets may
 * still come for them. Beyond CL_RETIRED_MAX the oldest are forgotten.
 */
#ifndef CL_CORE_RETIRED_H
#define CL_CORE_RETIRED_H

#include <stdbool.h>
#include <stdint.h>

enum { CL_RETIRED_MAX = 1024 };

struct cl_retired_group {
    uint32_t group;
    int32_t reason;
    uint16_t blame; /* the peer that is the cause; UINT16_MAX: not known */
};

struct cl_retired {
    struct cl_retired_group *list; /* a ring once it is full */
    uint32_t count, capacity, oldest;
};

/* Adds a group, or gives its first reason again: true if it was new. Without memory nothing is remembered. */
bool cl_retired_add(struct cl_retired *retired, uint32_t group, int32_t reason, uint16_t blame);
const struct cl_retired_group *cl_retired_find(const struct cl_retired *retired, uint32_t group);
void cl_retired_free(struct cl_retired *retired);

#endif
