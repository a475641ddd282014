/*
 * Scavenger: the window of a path for messages of CL_CLASS_YIELDS, which take only what nobody else wants, after LEDBAT
 * (RFC 6817) and LEDBAT++ (draft-irtf-iccrg-ledbat-plus-plus): a queue that no flow like TCP would notice is a reason
 * to send less.
 *
 * Differences from LEDBAT++:
 *  - The delay is the least of a round trip, in all queues on the way, this host's interface included. So the class
 *    yields to this host's other traffic as well.
 *  - The target is 0.5 ms, not 60, or a quarter of the queue at which packets were last lost: buffers in a cluster are
 *    short. It is four packets at least.
 *  - A window that is at its least and still finds a queue is not the cause of that queue: somebody else is there. From
 *    then on it grows by an eighth of a packet per round, until CL_SCAVENGER_CALM_ROUNDS without a queue show that it
 * is alone. Else flows which drain the queue at times, as cubic does after a loss, would lose a share each time.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_SCAVENGER_CALM_ROUNDS = 64 };

/* What one acknowledgement says. */
struct cl_scavenger_sample {
    uint64_t bytes;     /* newly acknowledged, of this class */
    uint64_t largest;   /* largest packet number acknowledged */
    uint64_t next;      /* the next packet number to be sent */
    bool limited;       /* this window kept the sender from sending more */
    bool marked;        /* switches have marked packets (ECN) */
    bool timed;         /* queue_us is new */
    uint32_t queue_us;  /* time spent in queues */
    uint32_t packet_us; /* time a full packet takes on this host's interface */
};

struct cl_scavenger {
    uint32_t packet_bytes; /* of a full packet */
    double window;         /* bytes that may be in flight */
    bool slow_start;
    bool beside;          /* other traffic is there */
    uint32_t calm_rounds; /* without a queue, in a row */
    uint32_t target_us;   /* of the delay, where that is more than some packets */
    uint32_t packet_us;   /* of the latest sample */
    uint64_t round_end;   /* the round ends when this number is acknowledged */
    uint32_t least_us;    /* the least delay in this round; UINT32_MAX: none is known */
    uint32_t most_us;     /* the most */
    bool limited;         /* the window was the limit in this round */
    bool congested;       /* packets were lost or marked in this round */
    bool cut;             /* the packets of this round left before the window was cut */
};

void cl_scavenger_init(struct cl_scavenger *scavenger, uint32_t packet_bytes);
void cl_scavenger_on_acked(struct cl_scavenger *scavenger, const struct cl_scavenger_sample *sample);
/* Packets of the path were lost, of whatever class. */
void cl_scavenger_on_lost(struct cl_scavenger *scavenger);
/* No acknowledgement came for a probe timeout; count: timeouts in a row. */
void cl_scavenger_on_pto(struct cl_scavenger *scavenger, uint32_t count);

static inline uint64_t cl_scavenger_window(const struct cl_scavenger *scavenger)
{
    return (uint64_t)scavenger->window;
}
