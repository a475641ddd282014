/*
 * Active set: counts the members that were seen lately. A member that has not been seen for a while leaves the set.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct cl_active_set_member {
    bool counted;
    uint64_t seen_us;
    struct cl_active_set_member *previous, *next; /* by seen_us, the oldest first */
};

struct cl_active_set {
    struct cl_active_set_member *first, *last;
    uint32_t count;
};

/* Notes that the member was seen. now_us must not decrease from call to call. */
void cl_active_set_see(struct cl_active_set *active_set, struct cl_active_set_member *member, uint64_t now_us);
void cl_active_set_leave(struct cl_active_set *active_set, struct cl_active_set_member *member);
/* The number of members seen in the last idle_us. */
uint32_t cl_active_set_count(struct cl_active_set *active_set, uint64_t idle_us, uint64_t now_us);
