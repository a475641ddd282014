/*
 * Egress: what the n-th paths to all peers share: this host's n-th interface and the queue in front of it.
 *
 * Each path has its own congestion control, but when the queue is our own, windows fighting each other for it would share
 * it by chance. So the queueing delay is split: the part that all paths see is the interface's, and one window over all of
 * them keeps it at the target; inside that window the peers take turns, which is fair by construction. What a path sees on
 * top of it lies elsewhere (a receiver's port, the fabric), and is the business of the path's own window.
 */
#ifndef CL_CORE_EGRESS_H
#define CL_CORE_EGRESS_H

#include "core/cc.h"
#include "core/sent.h"

struct cl_egress {
    struct cl_flight flight;
    struct cl_cc cc;
    uint32_t queue_us;       /* the smallest that any path saw in the last full round, or since */
    uint32_t round_queue_us; /* the same for the round that goes on */
    uint64_t round_end;      /* in packets settled */
    uint64_t limited_until;  /* in packets settled: those below left while the window was the limit */
    bool waited_for;         /* peers were blocked while it was full */
};

void cl_egress_init(struct cl_egress *egress, const struct cl_cc_type *type, uint32_t datagram_bytes,
                    uint64_t fixed_rate);

/* Room for one more packet. */
static inline bool cl_egress_open(const struct cl_egress *egress, uint32_t bytes)
{
    return egress->flight.bytes + bytes <= egress->cc.window;
}

/* A sender was kept from sending by the window. */
void cl_egress_limit(struct cl_egress *egress);

/* An acknowledgement came on one of the paths; sample.queue_us is what that path saw, and is reduced to the part that is
 * not the interface's. */
void cl_egress_on_acked(struct cl_egress *egress, struct cl_cc_sample *sample, uint64_t now_us);
void cl_egress_on_lost(struct cl_egress *egress, uint64_t bytes, uint32_t packets, uint64_t now_us);

#endif
