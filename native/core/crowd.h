/*
 * Crowd: how many take part in something lately. Whoever was not seen for a while is out.
 */
#ifndef CL_CORE_CROWD_H
#define CL_CORE_CROWD_H

#include <stdbool.h>
#include <stdint.h>

struct cl_crowd_member {
    bool counted;
    uint64_t seen_us;
    struct cl_crowd_member *previous, *next; /* by seen_us, the oldest first */
};

struct cl_crowd {
    struct cl_crowd_member *first, *last;
    uint32_t count;
};

/* now_us must not be less than before. */
void cl_crowd_see(struct cl_crowd *crowd, struct cl_crowd_member *member, uint64_t now_us);
void cl_crowd_leave(struct cl_crowd *crowd, struct cl_crowd_member *member);
/* Of those seen in the last idle_us. */
uint32_t cl_crowd_count(struct cl_crowd *crowd, uint64_t idle_us, uint64_t now_us);

#endif
