/*
 * Congestion control of one path: how much of it may be in flight, and how fast it leaves. Bytes are those of
 * datagrams, header included. The queue of the interface, which all its paths share, is the business of egress.h.
 */
#ifndef CL_CONGESTION_CC_H
#define CL_CONGESTION_CC_H

#include <stdbool.h>
#include <stdint.h>

#include "congestion/loss_trial.h"

/* What one acknowledgement says. */
struct cl_cc_sample {
    uint64_t bytes;     /* newly acknowledged */
    uint32_t packets;   /* the same */
    uint32_t marked;    /* packets that switches marked (ECN), as the receiver has counted since the last sample */
    uint64_t largest;   /* packet number acknowledged */
    uint64_t next;      /* the next packet number to be sent */
    bool limited;       /* the window was what kept the sender from sending more */
    bool timed;         /* the two below are new */
    uint32_t queue_us;  /* time spent in the network's queues beyond this host's interface */
    uint32_t packet_us; /* time a full packet takes on this host's interface */
    uint32_t base_us;   /* round trip of the empty network */
    uint64_t share;     /* bytes per second for each sender at the receiver's port; 0: it has no other, or not known */
    bool crowded;       /* more hosts send to that port than we have receivers: it is the narrow place, not ours */
};

struct cl_cc {
    uint32_t packet_bytes; /* of a full packet */
    uint64_t window;       /* bytes that may be in flight */
    uint64_t rate;         /* bytes per second for the path's pacer; 0: not paced */
    uint64_t burst;        /* of that pacer */
    uint32_t queue_us;     /* sample.queue_us, smoothed */

    bool slow_start;
    uint32_t target_us;
    uint64_t round_end;      /* the round ends when this number is acknowledged */
    uint64_t decrease_after; /* no second decrease before this number is acknowledged */
    bool sharing;            /* keeps to its share */
    uint32_t calm_rounds;    /* without a queue, while sharing */
    double window_before;    /* of the cut on trial */
    uint32_t acked, marked;  /* packets in this round */
    double marked_part;      /* of late; 0 where nobody marks */
    struct cl_loss_trial loss_trial;
};

void cl_cc_init(struct cl_cc *cc, uint32_t packet_bytes);
void cl_cc_on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample);
void cl_cc_on_lost(struct cl_cc *cc, uint32_t packets);
void cl_cc_on_pto(struct cl_cc *cc, uint32_t count); /* timeouts in a row */

#endif
