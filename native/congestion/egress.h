/*
 * Egress: one network interface of this host and the queue in front of it, shared by all paths that leave through it.
 *
 * Other processes of this host send through the interface, too. They tell what they send, each has a share of the
 * capacity (neighbours.h), and all bytes count in what follows.
 *
 * One pacer over all paths keeps a small standing queue there, and the peers take turns inside it. That is fair at once
 * and by construction; the windows of the paths would have to fight for their shares. The pacer needs two facts:
 *
 *  - capacity: the bytes sent between two packets to one peer, divided by the time between their arrivals (the peer's
 *    clock, from its acknowledgements). This is the rate of the link if the link was busy in between, however late
 *    either host is scheduled. If the link was idle the quotient is lower, so it may only raise the estimate.
 *    The link was idle if a packet left after the previous one had drained. Where switches mark packets, it was also
 *    idle if the pacer's bucket was full: then the windows, which answer marks, limit the sender, and a queue that all
 *    peers see stands in front of the peers.
 *    A slow path that has nothing beside it must not pass for the link: a measurement of less than half of the capacity
 *    does not count if the bucket was full at times, and the capacity has been confirmed. A measurement confirms the
 *    capacity if it raises it, or if the bucket was never full. Overflows undo that: the link may have become slower.
 *    Urgent packets may overtake other classes. So between two packets of a class, only bytes of this class and of more
 *    urgent ones count. They are less than the link has carried, and may only raise the estimate. While several classes
 *    are in use, no measurement is faster than the pacer's own account, as some of the bytes sent between two packets
 *    may have overtaken the first.
 *    Bytes that were lost have not crossed the link, unless it is known to be lossy: counted, they would raise the rate
 *    above the capacity for good wherever the queue is too short to show a delay.
 *  - queue: the delay above the minimum that all paths see. Delay that only one path sees arises elsewhere (a
 *    receiver's port, the fabric), and that path's window answers it.
 *
 * rate = share of the capacity * (1 + (target - queue) / RECOVERY), and higher while there is no queue at all. The
 * bucket holds the capacity times `depth`, and beside other processes an equal part of that: an engine thread that
 * slept that long catches up at once. Losses may mean that the link's queue has less room. Then the depth goes down to
 * its least for a loss trial (loss_trial.h): if the losses stop, the depth shrinks and grows again slowly; if they go
 * on, the link is lossy and the depth stays.
 *
 * Urgent packets have to get past that queue. So where several classes are in use, the more urgent ones do not wait for
 * the bucket: they go into debt, by a burst at most. Less urgent packets pay the debt; if a burst is not enough, the
 * urgent ones wait as well. While a class below CL_CLASSES_URGENT is in use, the target shrinks to the packets that
 * fairness needs.
 */
#pragma once

#include <stdbool.h>

#include "congestion/active_set.h"
#include "congestion/batches.h"
#include "congestion/class.h"
#include "congestion/loss_trial.h"
#include "congestion/neighbours.h"
#include "congestion/pacer.h"

enum {
    CL_EGRESS_OVERHEAD_BYTES = 42, /* Ethernet, IP and UDP headers: small packets cost more than their bytes */
    CL_EGRESS_IDLE_US = 250000,
    CL_EGRESS_MIXED_US = 1000000, /* how long a class is remembered */
};

struct cl_egress {
    bool startup; /* doubling until a queue appears */
    bool marked;  /* switches on the way mark packets (ECN) */
    uint32_t datagram_bytes;
    struct cl_pacer pacer;
    /* since the start, by this process; `bytes`: of a class and all more urgent ones */
    uint64_t own_bytes[CL_CLASSES_BETWEEN_HOSTS], own_lost_bytes;
    uint64_t bytes[CL_CLASSES_BETWEEN_HOSTS], lost_bytes; /* the same, by the neighbours as well */
    uint64_t idle_us;                                     /* when the link was last known to be idle */
    uint64_t full_us;                                     /* when a packet last found the pacer's bucket full */
    uint64_t busy_until_us;
    double capacity;    /* bytes per second */
    double fastest;     /* the highest capacity of lately; 0: unknown */
    uint32_t weight;    /* measurements that `capacity` averages, up to a maximum */
    uint32_t confirmed; /* measurements since the queue last overflowed that confirm it, up to a maximum */
    uint32_t depth_us;
    uint32_t overflow_us;           /* the depth at which the queue overflowed last, or is expected to */
    uint64_t cut_us;                /* when the depth was last cut */
    uint32_t cut_depth_us;          /* the depth after the loss trial, if it shows that the queue overflows */
    struct cl_active_set receivers; /* paths that carried data lately */
    uint32_t round_trip_us;         /* the longest of the paths of lately, without what hosts take to answer */
    uint32_t queue_us;              /* common to all paths */
    uint32_t epoch_queue_us;        /* smallest in this epoch */
    uint32_t epoch_longest_us;      /* largest in this epoch */
    bool empty;                     /* no packet waited in the last epoch */
    uint32_t epoch_samples;
    struct cl_loss_trial loss_trial;
    struct cl_batches batches;
    uint64_t epoch_began_us, epoch_end_us;
    uint8_t last_class;              /* the least urgent class seen lately */
    uint64_t last_class_us;          /* when it was seen */
    uint64_t borrowed;               /* bytes that urgent classes sent on debt since the others had their turn */
    uint64_t mixed_until_us;         /* until then, several classes count as in use */
    uint64_t urgent_until_us;        /* until then, a class below CL_CLASSES_URGENT counts as in use beside others */
    struct cl_neighbours neighbours; /* last: it is large */
};

/* State of the interface when it sent a packet. */
struct cl_egress_snapshot {
    uint64_t bytes;    /* sent before it, of its class and all more urgent ones */
    uint64_t paced_us; /* when the bytes before it have drained, by the pacer's account */
};

/* An acknowledged packet. */
struct cl_egress_sample {
    uint8_t class;
    bool overtaken; /* by a more urgent packet: it says nothing about the link's rate */
    bool crowded;   /* the bottleneck is the receiver's port, not this interface */
    struct cl_egress_snapshot snapshot;
    uint64_t sent_us;
    uint32_t clock_us;      /* when it arrived, by the peer's clock */
    uint32_t queue_us;      /* time it spent in queues */
    uint32_t round_trip_us; /* that time, and the shortest round trip of its path */
    uint64_t lost_bytes;    /* of the interface, so far; set when a measurement begins with this packet */
};

/* The state of one path between its samples. */
struct cl_egress_view {
    bool any;
    uint32_t queue_us; /* smoothed */
    struct cl_egress_sample
        start[CL_CLASSES_BETWEEN_HOSTS]; /* by class: first packet of the running measurement of capacity */
    uint16_t started;                    /* bit c: start[c] is set */
};

void cl_egress_init(struct cl_egress *egress, uint32_t datagram_bytes);

/* Notes a data packet of this class that leaves; first_class: the most urgent class with data to send. */
void cl_egress_see(struct cl_egress *egress, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us);
/* Whether less urgent data shares the interface with this class. */
static inline bool cl_egress_urgent(const struct cl_egress *egress, uint8_t class, uint64_t now_us)
{
    return class < egress->last_class && now_us < egress->last_class_us + CL_EGRESS_MIXED_US;
}
/* The time when packets of this class may leave: now_us or later. */
uint64_t cl_egress_ready_us(struct cl_egress *egress, uint8_t class, uint64_t now_us);
/* The state before a packet of this class, which is about to be sent. */
struct cl_egress_snapshot cl_egress_snapshot(const struct cl_egress *egress, uint8_t class, uint64_t now_us);
/* Counts a packet that leaves, of any kind. */
void cl_egress_sent(struct cl_egress *egress, uint8_t class, uint32_t bytes);
/* What this process knows of the interface, for its neighbours; what one of them knows (neighbours.h). */
struct cl_told cl_egress_tell(const struct cl_egress *egress);
void cl_egress_hear(struct cl_egress *egress, uint32_t neighbour, const struct cl_told *told, uint64_t now_us);
/* All neighbours have been heard. Returns whether one of them sends now. */
bool cl_egress_heard(struct cl_egress *egress, uint64_t now_us);

/* What the interface carries of this process, in bytes per second: its share of the capacity. */
static inline double cl_egress_rate(const struct cl_egress *egress)
{
    return cl_neighbours_leave(&egress->neighbours, egress->capacity);
}

/* Takes an acknowledged packet in. Returns its queueing delay beyond this interface. */
uint32_t cl_egress_on_sample(struct cl_egress *egress, struct cl_egress_view *view,
                             const struct cl_egress_sample *sample, uint64_t now_us);
/* The queue has overflowed at the present depth. */
void cl_egress_overflowed(struct cl_egress *egress, uint64_t now_us);
void cl_egress_on_settled(struct cl_egress *egress, uint32_t acked, uint32_t lost);

/* How many paths carried data lately. `Lately` is longer here than where a receiver counts its senders: a sender that
 * pauses must not take the receiver's port for crowded. */
static inline uint32_t cl_egress_receivers(struct cl_egress *egress, uint64_t now_us)
{
    return cl_active_set_count(&egress->receivers, CL_EGRESS_IDLE_US, now_us);
}

/* The length of the queue to keep in front of the interface, as a time. While urgent packets are about, it is shorter.
 */
double cl_egress_target_us(const struct cl_egress *egress);
/* The same at the highest capacity of lately: the queue to keep when no other flow takes a part of the link. */
double cl_egress_target_alone_us(const struct cl_egress *egress);

/* The bytes of a batch (batches.h) that may go to one peer: what the pacer gathers, but no more than leaves in a short
 * time, for which other peers wait. 0: now there are no batches. */
uint64_t cl_egress_batch(const struct cl_egress *egress, uint64_t now_us);

/* How long a full packet takes on the link. */
static inline double cl_egress_packet_us(const struct cl_egress *egress)
{
    return egress->datagram_bytes * 1e6 / egress->capacity;
}

/* The same at the highest capacity of lately. */
static inline double cl_egress_fastest_packet_us(const struct cl_egress *egress)
{
    double fastest = egress->fastest > egress->capacity ? egress->fastest : egress->capacity;
    return egress->datagram_bytes * 1e6 / fastest;
}

/* How long the bytes sent so far still take to drain, by the pacer's account. */
uint64_t cl_egress_backlog_us(const struct cl_egress *egress);
