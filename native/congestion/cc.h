/*
 * Congestion control of one path: how much of it may be in flight, and how fast it leaves. The kinds are const vtables
 * with a name; their state is a union in struct cl_cc. Bytes are those of datagrams, header included.
 *
 * What all paths of an interface share, its own queue, is not their business: see egress.h.
 */
#ifndef CL_CONGESTION_CC_H
#define CL_CONGESTION_CC_H

#include <stdbool.h>
#include <stdint.h>

#include "congestion/loss_trial.h"

struct cl_cc;

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

struct cl_cc_type {
    const char *name;
    bool shares_egress; /* wants the common pacer of egress.h */
    void (*init)(struct cl_cc *cc);
    void (*on_acked)(struct cl_cc *cc, const struct cl_cc_sample *sample);
    void (*on_lost)(struct cl_cc *cc, uint32_t packets);
    void (*on_pto)(struct cl_cc *cc, uint32_t count); /* timeouts in a row */
};

struct cl_cc_delay {
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

struct cl_cc {
    const struct cl_cc_type *type;
    uint32_t packet_bytes; /* of a full packet */
    uint64_t window;       /* bytes that may be in flight */
    uint64_t rate;         /* bytes per second for the path's pacer; 0: not paced */
    uint64_t burst;        /* of that pacer */
    uint32_t queue_us;     /* sample.queue_us, smoothed */
    struct cl_cc_delay delay;
};

extern const struct cl_cc_type cl_cc_type_delay;
extern const struct cl_cc_type cl_cc_type_fixed;

/* NULL when there is no such type. */
const struct cl_cc_type *cl_cc_find(const char *name);
/* fixed_rate: bytes per second, for cl_cc_type_fixed. */
void cl_cc_init(struct cl_cc *cc, const struct cl_cc_type *type, uint32_t packet_bytes, uint64_t fixed_rate);

#endif
