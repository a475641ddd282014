/*
 * Reordering: how late packets may come through an interface without being lost.
 *
 * A packet counts as lost if a packet was acknowledged that was sent `threshold` numbers later, or 9/8 of a round trip
 * later (RFC 9002, section 6.1). A network that sprays packets over several ways reorders them. So both limits grow
 * when a late acknowledgement disproves a loss, and shrink again after CL_REORDERING_PERSIST rounds of losses that
 * nothing disproved (RFC 8985, section 6.2, has the same number).
 *
 * All paths of an interface share the limits. A path to one of a hundred peers carries few packets at a time, and would
 * take many for lost before it had learned what the others know.
 */
#pragma once

#include <stdint.h>

enum {
    CL_REORDERING_THRESHOLD = 3, /* numbers, at least */
    CL_REORDERING_THRESHOLD_MAX = 128,
    CL_REORDERING_SHIFT = 3, /* the time limit is a round trip, and 1 / 2^3 of it at least, all of it at most */
    CL_REORDERING_PERSIST = 16,
};

/* All zero at the start. */
struct cl_reordering {
    uint32_t more;       /* than CL_REORDERING_THRESHOLD */
    uint32_t longer;     /* the shift is less by this */
    uint32_t undisputed; /* rounds of losses since the last one that was disproved */
};

static inline uint32_t cl_reordering_threshold(const struct cl_reordering *reordering)
{
    return CL_REORDERING_THRESHOLD + reordering->more;
}

static inline uint64_t cl_reordering_wait_us(const struct cl_reordering *reordering, uint64_t round_us)
{
    return round_us + (round_us >> (CL_REORDERING_SHIFT - reordering->longer)) + 1;
}

/* A packet that counted as lost was acknowledged; it would not have been lost with this threshold. */
void cl_reordering_disprove(struct cl_reordering *reordering, uint64_t needed);
/* A path has lost packets. It says so once in a round trip. */
void cl_reordering_count_round(struct cl_reordering *reordering);
