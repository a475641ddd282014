/*
 * Closed groups: the groups that ended here, with the reason: closed (0) or aborted (a negative enum cl_error). Packets
 * may still come for them. Beyond CL_CLOSED_GROUPS_MAX groups the oldest are forgotten.
 */
#ifndef CL_PROTOCOL_CLOSED_GROUPS_H
#define CL_PROTOCOL_CLOSED_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

enum { CL_CLOSED_GROUPS_MAX = 1024 };

struct cl_closed_group {
    uint32_t group;
    int32_t reason;
    uint16_t culprit; /* peer; UINT16_MAX: not known */
};

struct cl_closed_groups {
    struct cl_closed_group *list; /* a ring once it is full */
    uint32_t count, capacity, oldest;
    struct cl_closed_group *reports; /* groups that failed because of a peer, first in, first out */
    uint32_t report_count, report_capacity;
};

/* Adds a group. False when it was there already; its first reason stays. Without memory nothing is remembered. */
bool cl_closed_groups_add(struct cl_closed_groups *closed, uint32_t group, int32_t reason, uint16_t culprit);
const struct cl_closed_group *cl_closed_groups_find(const struct cl_closed_groups *closed, uint32_t group);
/* Queues a group that a peer ended for cl_closed_groups_next_report. Without memory nothing is reported. */
void cl_closed_groups_report(struct cl_closed_groups *closed, const struct cl_closed_group *group);
bool cl_closed_groups_next_report(struct cl_closed_groups *closed, struct cl_closed_group *group);
void cl_closed_groups_free(struct cl_closed_groups *closed);

#endif
