/*
 * Closed groups: the groups that ended here, with the reason: closed (0) or aborted (a negative enum cl_error). Packets
 * may still come for them. Beyond CL_CLOSED_GROUPS_MAX groups the oldest are forgotten. There is always memory: groups
 * end for want of it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_CLOSED_GROUPS_MAX = 1024 };

struct cl_closed_group {
    uint32_t group;
    int32_t reason;
    uint16_t culprit; /* peer; UINT16_MAX: not known */
};

/* All zero: none. */
struct cl_closed_groups {
    struct cl_closed_group list[CL_CLOSED_GROUPS_MAX]; /* a ring once it is full */
    bool untold[CL_CLOSED_GROUPS_MAX];                 /* for cl_closed_groups_next_report */
    uint32_t count, oldest, untold_count;
};

/* Adds a group. False when it was there already; its first reason stays. */
bool cl_closed_groups_add(struct cl_closed_groups *closed, uint32_t group, int32_t reason, uint16_t culprit);
const struct cl_closed_group *cl_closed_groups_find(const struct cl_closed_groups *closed, uint32_t group);
/* Has cl_closed_groups_next_report report a group that has been added, because a peer ended it. */
void cl_closed_groups_report(struct cl_closed_groups *closed, uint32_t group);
/* The groups come in the order in which they were added. */
bool cl_closed_groups_next_report(struct cl_closed_groups *closed, struct cl_closed_group *group);
