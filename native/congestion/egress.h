/*
 * Egress: what the n-th paths to all peers share: this host's n-th interface and the queue in front of it.
 *
 * The windows of the paths could fight for that queue, but it is our own: one pacer over all of them keeps a small
 * standing queue, and inside it the peers take turns, which is fair by construction and at once. The pacer needs two
 * facts:
 *
 *  - capacity: bytes we sent between two packets to one peer, over the time between their arrivals there (the peer's
 * clock, as its acknowledgements tell it). That is the rate of the link as long as it was busy, whatever our own or the
 * peer's scheduling does to the acknowledgements; when it was not busy it is less, so it can only raise the estimate.
 * It was not when packets left later than those before them were through. Where switches mark packets it was not when
 * the pacer's bucket was full either: then it is the windows that keep us from sending, which answer the marks, and a
 * queue that all peers see stands before the peers and not here.
 * What is urgent may overtake other classes, so between two of its packets only those bytes count that it cannot
 * overtake: of its class and more urgent ones. It is less than the link has carried, and can only raise the estimate.
 * And while there are several classes no measurement is faster than the pacer's own account, as some of the bytes sent
 * between two packets may have gone before the first.
 *  - queue: the delay above the minimum that all paths see; what one path sees on top lies elsewhere (a receiver's
 * port, the fabric) and is the business of that path's window.
 *
 * rate = capacity * (1 + (target - queue) / RECOVERY), and more while there is no queue at all. The bucket holds
 * `depth` of rate: after sleeping that long the engine can put into the link's queue all that it could not before. The
 * depth shrinks when losses show that the queue does not have that room, and grows again slowly.
 *
 * What is urgent has to get past that queue. So where there is more than one class the more urgent ones do not wait for
 * the bucket: they take a burst on debt. The others pay it, or, when there is more that is urgent than a burst, those
 * themselves. And while one of them is of CL_CLASSES_URGENT, the target is only the packets that fairness needs.
 */
#ifndef CL_CONGESTION_EGRESS_H
#define CL_CONGESTION_EGRESS_H

#include <stdbool.h>

#include "congestion/active_set.h"
#include "congestion/class.h"
#include "congestion/loss_trial.h"
#include "congestion/pacer.h"

enum {
    CL_EGRESS_OVERHEAD_BYTES = 42, /* Ethernet, IP and UDP headers: small packets cost more than their bytes */
    CL_EGRESS_IDLE_US = 250000,
    CL_EGRESS_MIXED_US = 1000000, /* how long a class is remembered */
};

struct cl_egress {
    bool startup;    /* doubling until a queue appears */
    bool waited_for; /* peers are blocked until the pacer lets go */
    bool marked;     /* switches beyond it mark packets (ECN) */
    uint32_t datagram_bytes;
    struct cl_pacer pacer;
    uint64_t bytes[CL_CLASSES]; /* sent ever, of this class and all more urgent ones */
    uint64_t turn;              /* the least that one of the peers that wait has got of it: see `turns` in peer.h */
    uint64_t idle_us;           /* when the link last was idle, as far as we can tell */
    uint64_t busy_until_us;
    double capacity; /* bytes per second */
    uint32_t weight; /* measurements of capacity, up to a maximum */
    uint32_t depth_us;
    uint32_t overflow_us;           /* the depth at which the queue overflowed last, or may */
    uint64_t cut_us;                /* when that was */
    struct cl_active_set receivers; /* paths that got data lately */
    uint32_t queue_us;              /* common to all paths */
    uint32_t epoch_queue_us;        /* smallest in this epoch */
    uint32_t epoch_longest_us;      /* longest in this epoch */
    bool empty;                     /* nobody waited at all in the last epoch */
    uint32_t epoch_samples;
    struct cl_loss_trial loss_trial;
    uint64_t epoch_end_us;
    uint8_t last_class;       /* the least urgent one that was seen lately */
    uint64_t last_class_us;   /* when */
    uint64_t borrowed;        /* bytes that urgent ones have sent on debt since others had their turn */
    uint64_t mixed_until_us;  /* something more urgent was seen, too: until when that counts */
    uint64_t urgent_until_us; /* that was one of CL_CLASSES_URGENT */
};

/* How far the interface was when it sent a packet. */
struct cl_egress_snapshot {
    uint64_t bytes;    /* of the packet's class and all more urgent ones, before it */
    uint64_t paced_us; /* when all that was sent before it is through, by the pacer's account */
};

/* An acknowledged packet. */
struct cl_egress_sample {
    uint8_t class;
    bool overtaken; /* by what is more urgent: it says nothing of the link's rate */
    bool crowded;   /* the receiver's port is the narrowest place, not the interface */
    struct cl_egress_snapshot snapshot;
    uint64_t sent_us;
    uint32_t clock_us; /* when it arrived: the peer's clock */
    uint32_t queue_us; /* that it spent in queues */
};

/* What one path remembers between its samples. */
struct cl_egress_view {
    bool any;
    uint32_t queue_us;                         /* smoothed */
    struct cl_egress_sample start[CL_CLASSES]; /* by class: where the measurement of capacity began */
    uint8_t started;                           /* bit c: start[c] is one */
};

void cl_egress_init(struct cl_egress *egress, uint32_t datagram_bytes);

/* Data of this class goes, while first_class is the most urgent one that has any. */
void cl_egress_see(struct cl_egress *egress, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us);
/* Whether data of this class has less urgent data to get past. */
static inline bool cl_egress_urgent(const struct cl_egress *egress, uint8_t class, uint64_t now_us)
{
    return class < egress->last_class && now_us < egress->last_class_us + CL_EGRESS_MIXED_US;
}
/* When packets of this class may leave: now_us or later. */
uint64_t cl_egress_ready_us(struct cl_egress *egress, uint8_t class, uint64_t now_us);
/* For a packet of this class that is about to be sent. */
struct cl_egress_snapshot cl_egress_snapshot(const struct cl_egress *egress, uint8_t class, uint64_t now_us);
/* Counts any packet. */
void cl_egress_sent(struct cl_egress *egress, uint8_t class, uint32_t bytes);

/* Returns the part of the delay that is not the interface's. */
uint32_t cl_egress_on_sample(struct cl_egress *egress, struct cl_egress_view *view,
                             const struct cl_egress_sample *sample, uint64_t now_us);
void cl_egress_on_settled(struct cl_egress *egress, uint32_t acked, uint32_t lost);

/* How many paths got data lately: longer ago than a receiver counts its senders, so that turns and pauses of ours are
 * no reason to think its port crowded. */
static inline uint32_t cl_egress_receivers(struct cl_egress *egress, uint64_t now_us)
{
    return cl_active_set_count(&egress->receivers, CL_EGRESS_IDLE_US, now_us);
}

/* How long a full packet takes on the link. */
static inline double cl_egress_packet_us(const struct cl_egress *egress)
{
    return egress->datagram_bytes * 1e6 / egress->capacity;
}

/* How long what was sent lately will take to leave, by the pacer's account. */
uint64_t cl_egress_backlog_us(const struct cl_egress *egress);

#endif
