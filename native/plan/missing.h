/*
 * Missing: the ranges that the messages of one operation did not count.
 *
 *  - `uncounted`: ranges of this rank's contribution (CL_INPUT) that their owners did not receive;
 *  - `stale`: ranges of CL_OUTPUT that keep their former value, because a result did not come;
 *  - `absent`: ranges of CL_OUTPUT, owned by this rank, that lack one contribution of one message. Ranges may overlap:
 *    several contributions may be absent from the same part.
 */
#pragma once

#include "plan/plan.h"
#include "protocol/ranges.h"

struct cl_missing {
    struct cl_ranges uncounted, stale;
    struct cl_range *absent; /* in no order */
    uint32_t absent_count, absent_capacity;
};

/* The values in a range of whole blocks of the step's encoded message, in bytes from the first one. */
struct cl_range cl_step_values(const struct cl_step *step, const struct cl_codec *codec,
                               const struct cl_range *encoded);

/* Notes the ranges (within the message) that the message of a partial step did not count. False when there is no
 * memory. */
bool cl_missing_add(struct cl_missing *missing, const struct cl_step *step, const struct cl_range *ranges,
                    uint32_t count);

/* Cuts [start, end) of CL_OUTPUT into parts with the same number of absent contributions. Begin with *at = start. Each
 * call advances *at to the end of the part that begins there, and returns how many contributions are absent from it. */
uint32_t cl_missing_next(const struct cl_missing *missing, uint64_t *at, uint64_t end);

void cl_missing_free(struct cl_missing *missing);
