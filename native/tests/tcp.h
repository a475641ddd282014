/*
 * TCP: models of flows of others, with data without end, through the port of host 1 of a test's network.
 *
 * Cubic is that of RFC 9438 with HyStart's rule of delay and an RTO of 200 ms and two round trips; BBR is version 1
 * (Cardwell et al., ACM Queue 2016). Both know at once which packets were lost (SACK without reordering) and
 * acknowledge each packet, and their acknowledgements take no bandwidth.
 */
#pragma once

#include "tests/network.h"

enum { TCP_RING = 1 << 16 /* most packets in flight */, TCP_ROUNDS = 10 };

enum tcp_kind { TCP_CUBIC, TCP_BBR };

struct tcp_cubic {
    double window, threshold, before, k, origin, reno; /* packets; k: seconds */
    uint64_t epoch_ns, recover, least_ns;
};

struct tcp_bbr {
    enum { BBR_STARTUP, BBR_DRAIN, BBR_BANDWIDTH, BBR_ROUND_TRIP } state;
    int phase, full_rounds;
    double rates[TCP_ROUNDS], full_rate; /* packets per ns; the most of each round */
    uint64_t rounds, delivered, delivered_ns, round_delivered;
    uint64_t cycle_ns, least_ns, least_at_ns, probe_until_ns, next_ns;
};

struct tcp_sent {
    uint64_t sent_ns, delivered, delivered_ns;
};

struct tcp_ack;

struct tcp {
    struct sim_event timer; /* the first member. BBR: pacing and silence; cubic: RTO */
    struct network *network;
    enum tcp_kind kind;
    uint64_t round_ns;    /* round trip of the empty network, without the port's transmission */
    uint64_t next, acked; /* numbers: of the next packet; all before `acked` are acknowledged or lost */
    uint64_t carried;     /* packets that arrived */
    struct tcp_cubic cubic;
    struct tcp_bbr bbr;
    struct tcp_sent sent[TCP_RING];
    struct tcp_ack *acks; /* on their way: TCP_RING */
};

/* A flow begins now. */
struct tcp *tcp_new(struct network *network, enum tcp_kind kind, uint64_t round_us);
/* After network_free: events of the flow wait in the network's clock. */
void tcp_free(struct tcp *tcp);
