/*
 * Contest: whether another flow keeps the queue of a path full, and the window of the path while it does.
 *
 * The rest of the control keeps queues short. So it leaves the link to any flow that fills the buffer, as TCP does. And
 * where the buffer is shorter than those queues, the control fills it, and TCP leaves the link. A contest begins
 *  - where the whole queue, that of this host's interface included, does not drain to what this job keeps on purpose
 *    for CL_CONTEST_ROUNDS round trips and longer, although its control sends less; the idea is that of Copa (Arun and
 *    Balakrishnan, NSDI 2018);
 *  - on a path that shares neither interface nor port, where packets are lost mostly while the queue is longer than
 *    usual: a buffer that is too short for the queue that the control keeps overflows. Packets that a link loses by
 *    chance are lost at any length of the queue;
 *  - on such a path, as part of a loss trial (loss_trial.h). If the link causes the losses, nothing changes.
 * Where several ranks of this host send through the interface, they have a queue together while one begins or ends. So
 * a queue has to stay longer, and a trial begins no contest where the buffer is long enough to show the queue of TCP.
 * Where several hosts send to a port, their own bursts overflow short buffers, and losses begin no contest. Where
 * switches mark packets (ECN), they tell all flows that a queue is too long, and the rest of the control heeds them: in
 * a round trip with a mark the queue begins no contest, and a mark ends one.
 *
 * In a contest all hosts that send to the receiver's port have the window of one flow of cubic together. Losses cut
 * this window only while the queue is longer than usual and at least half as long as the longest one of lately. From
 * these losses those are subtracted which the link would cause anyway, as often as at shorter queues. Where most losses
 * are others, the contest ends, unless the buffer is so short that it would overflow all the time without one. Where
 * the queue is longer than what this job keeps, the window goes down to what the empty network holds from time to time,
 * those of a host's ranks together: if the queue drains, nobody else fills it, and the contest ends as well.
 */
#pragma once

#include "congestion/cubic.h"
#include "congestion/loss_trial.h"

enum { CL_CONTEST_ROUNDS = 5 };

/* What one acknowledgement says. */
struct cl_contest_sample {
    uint64_t bytes;   /* newly acknowledged */
    uint32_t packets; /* newly acknowledged */
    uint32_t marked;  /* packets marked by switches (ECN) since the last sample */
    uint64_t largest; /* largest packet number acknowledged */
    uint64_t next;    /* the next packet number to be sent */
    uint32_t senders; /* hosts that send to the receiver's port; 0: unknown */
    uint32_t ranks;   /* this process, and those of this host that sent through its interface lately */
    bool alone;       /* the path shares neither its interface nor the receiver's port with another one that it sees */
    bool limited;     /* the window kept the sender from sending more */
    const struct cl_loss_trial *trial; /* of the interface or the path: that which goes on, if one does */
    bool timed;                        /* the rest is new */
    uint32_t queue_us;                 /* time spent in all queues on the way */
    uint32_t base_us;                  /* round trip of the empty network */
    uint32_t host_us;                  /* the rest of the round trip: hosts that sleep */
    uint32_t kept_us;                  /* queue that this job keeps on purpose, */
    uint32_t kept_alone_us;            /* and the one that it keeps alone on the link */
};

/* What an acknowledgement has changed. */
enum cl_contest_news {
    CL_CONTEST_NONE,
    CL_CONTEST_BEGAN,
    CL_CONTEST_OVERFLOWED, /* it began, and the interface should keep a shorter queue */
    CL_CONTEST_ENDED,
    CL_CONTEST_UNDONE, /* it ended as if it had not been */
};

struct cl_contest {
    uint32_t packet_bytes;
    bool active;
    struct cl_cubic cubic;  /* of all senders together */
    double first;           /* its window at the beginning */
    double cuts;            /* due to losses, and not made yet; less than 0: made, and not due yet */
    uint64_t recover;       /* no second cut before this number is acknowledged */
    bool alone;             /* as in the last sample */
    uint32_t ranks;         /* at least 1 */
    uint32_t senders;       /* to the port, or through the interface: those that have the window together */
    uint64_t largest, next; /* of the last sample */
    uint64_t acked_us;      /* when it came */
    uint32_t queue_us, base_us, kept_us, kept_alone_us;
    double host_us;    /* moving average */
    double longest_us; /* queue, of lately */

    uint64_t round_end;           /* the round ends when this number is acknowledged */
    uint64_t bytes, bytes_before; /* acknowledged in this round, and in the last one */
    double delivered;             /* the most bytes of a round, of lately */
    uint32_t least_us;            /* the shortest queue of this round; UINT32_MAX: none is known */
    bool marked;                  /* a switch has marked packets in this round */

    uint32_t queued_rounds; /* in a row, whose queue was longer than what is kept */
    uint64_t queued_us;     /* since when */
    uint64_t most_bytes;    /* of a round, since then */

    struct cl_loss_trial trial; /* a copy, which counts what leaves with the window of the contest */
    bool tried;                 /* the sample's trial has had its contest */
    uint64_t tried_from;        /* packets from this number on count */

    uint32_t probe_every; /* rounds */
    uint32_t rounds;      /* until the next probe of a lone rank, or until this one is over */
    uint64_t probe_at_us; /* when the latest one began */
    uint32_t probed_us;   /* the queue before this probe; 0: there is none */
    uint64_t ended_us;

    double sure; /* the square of the standard deviations that tell an overflow from chance */
    /* [1] while the queue was longer than usual, [0] else: */
    double usual_us;   /* moving average of the queue */
    double packets[2]; /* acknowledged */
    double losses[2];  /* round trips in which some were lost */
    double lost_us;    /* the queue at these times, moving average */
    uint64_t counted;  /* no second loss counts before this number is acknowledged */
};

void cl_contest_init(struct cl_contest *contest, uint32_t packet_bytes);
enum cl_contest_news cl_contest_on_acked(struct cl_contest *contest, const struct cl_contest_sample *sample,
                                         uint64_t now_us);
/* Packets were found to be lost at the same time, by the last acknowledgement. */
void cl_contest_on_lost(struct cl_contest *contest, uint32_t packets);
/* No acknowledgement came for a probe timeout; count: timeouts in a row. */
void cl_contest_on_pto(struct cl_contest *contest, uint32_t count);

/* Bytes of this path that may be in flight; after the end of a contest, those to go on with. */
uint64_t cl_contest_window(const struct cl_contest *contest);
/* The rate of its pacer in bytes per second, and the burst in bytes: what acknowledgements release must be no burst
 * that overflows the buffer. */
uint64_t cl_contest_rate(const struct cl_contest *contest);
uint64_t cl_contest_burst(const struct cl_contest *contest);
