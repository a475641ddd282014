/*
 * Ingress: what comes in at this host's n-th interface from all peers: how fast, and from how many of them at once.
 *
 * Several senders into one port meet in the queue before it, and only their receiver sees all of them. It tells each of
 * them both numbers in its acknowledgements. Senders that find a queue, or losses, then send at their share of that
 * rate at once instead of feeling their way there (cc_delay.c). So what all of them have in flight is bounded as soon
 * as delay or loss shows that it is too much: the dynamic incast of OptiReduce (Warraich et al., NSDI 2025), with
 * shares of every moment where that has turns.
 *
 * A sender counts until nothing more is awaited of it, or nothing has come for CL_INGRESS_IDLE_US.
 */
#ifndef CL_CONGESTION_INGRESS_H
#define CL_CONGESTION_INGRESS_H

#include "congestion/active_set.h"

enum { CL_INGRESS_IDLE_US = 50000 };

struct cl_ingress {
    struct cl_active_set senders;
    /* the epoch: since the arrival that began it */
    uint64_t began_us, latest_us, bytes;
    uint32_t packets, epochs;
    double rate, rate_before; /* bytes per second: the most in this half of the memory, and in the one before */
};

/* A packet of a message came. */
void cl_ingress_on_packet(struct cl_ingress *ingress, struct cl_active_set_member *sender, uint32_t bytes,
                          uint64_t received_us);

/* Bytes per millisecond that come in when the port is busy; 0: not known yet. */
uint32_t cl_ingress_rate(const struct cl_ingress *ingress);

#endif
