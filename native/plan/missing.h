/*
 * Missing: what the messages of one operation did not count.
 *
 *  - `uncounted`: parts of this rank's own contribution (CL_INPUT) that the owners of those ranges did not get;
 *  - `stale`: parts of CL_OUTPUT that keep their former value, because a result did not come;
 *  - `absent`: where this rank is the owner, parts of CL_OUTPUT to which one contribution, of one message, is absent.
 *    Several may be absent from the same part.
 */
#ifndef CL_PLAN_MISSING_H
#define CL_PLAN_MISSING_H

#include "plan/plan.h"
#include "protocol/ranges.h"

struct cl_missing {
    struct cl_ranges uncounted, stale;
    struct cl_range *absent; /* in no order */
    uint32_t absent_count, absent_capacity;
};

/* Notes what a bounded step's message did not count: ranges within the message. False when there is no memory. */
bool cl_missing_add(struct cl_missing *missing, const struct cl_step *step, const struct cl_range *ranges,
                    uint32_t count);

/* Cuts [start, end) of CL_OUTPUT into parts with the same number of absent contributions. Begin with *at = start; each
 * call gives the part that begins there, advances *at to its end, and returns how many are absent from it. */
uint32_t cl_missing_next(const struct cl_missing *missing, uint64_t *at, uint64_t end);

void cl_missing_free(struct cl_missing *missing);

#endif
