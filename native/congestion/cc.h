/*
 * Congestion control of one path: how much of it may be in flight, and how fast it leaves. Bytes are those of
 * datagrams, header included. The queue of the interface, which all its paths share, is the business of egress.h.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "congestion/loss_trial.h"

/* What one acknowledgement says. */
struct cl_cc_sample {
    uint64_t bytes;     /* newly acknowledged */
    uint32_t packets;   /* newly acknowledged */
    uint32_t marked;    /* packets marked by switches (ECN), counted by the receiver since the last sample */
    uint64_t largest;   /* largest packet number acknowledged */
    uint64_t next;      /* the next packet number to be sent */
    bool limited;       /* the window, and nothing else, kept the sender from sending more */
    bool contested;     /* another window (contest.h) is in use: this one waits for the end of the contest */
    bool timed;         /* queue_us and base_us are known */
    uint32_t queue_us;  /* time spent in the network's queues beyond this host's interface */
    uint32_t packet_us; /* time a full packet takes on this host's interface */
    uint32_t base_us;   /* round trip of the empty network */
    uint64_t share; /* bytes per second for each sender at the receiver's port; 0: there is one sender, or unknown */
    bool crowded;   /* the receiver's port has more senders than this host has receivers: it is the bottleneck */
};

struct cl_cc {
    uint32_t packet_bytes; /* of a full packet */
    uint64_t window;       /* bytes that may be in flight */
    uint64_t rate;         /* bytes per second for the path's pacer; 0: not paced */
    uint64_t burst;        /* of that pacer, bytes */
    uint32_t queue_us;     /* sample.queue_us, smoothed */

    bool slow_start;
    uint32_t target_us;
    uint64_t round_end;      /* the round ends when this number is acknowledged */
    uint64_t decrease_after; /* no second decrease before this number is acknowledged */
    bool sharing;            /* the window follows the share of the receiver's port */
    uint32_t calm_rounds;    /* rounds without a queue in a row, while sharing */
    double window_before;    /* before the cut of the loss trial */
    bool slow_start_before;  /* the same */
    uint32_t acked, marked;  /* packets in this round */
    double marked_part;      /* moving average of the marked share; 0: no switch marks */
    struct cl_loss_trial loss_trial;
};

void cl_cc_init(struct cl_cc *cc, uint32_t packet_bytes);
/* The queue to which the window grows. packet_us: as in a sample. */
uint32_t cl_cc_target_us(const struct cl_cc *cc, uint32_t packet_us);
/* Goes on from this window, after a contest: it doubles until there is a queue or a mark. */
void cl_cc_resume(struct cl_cc *cc, uint64_t window);
void cl_cc_on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample);
void cl_cc_on_lost(struct cl_cc *cc, uint32_t packets);
void cl_cc_on_pto(struct cl_cc *cc, uint32_t count); /* count: timeouts in a row */
