/*
 * Link: one direction of one cable: a queue, a rate, a delay, and noise. A route is a sequence of links.
 */
#ifndef CL_SIM_LINK_H
#define CL_SIM_LINK_H

#include "sim/medium.h"
#include "sim/noise.h"
#include "sim/queue.h"

struct sim_link {
    struct sim_event event; /* the end of the transmission under way */
    struct sim_medium *medium;
    char name[32];
    double ns_per_byte; /* 0: infinitely fast */
    double slowdown;    /* factor on ns_per_byte, for a while; 1: none */
    uint64_t delay_ns, jitter_ns;
    struct sim_queue queue;
    struct sim_noise noise;
    struct sim_datagram *sending;
    uint32_t mtu;             /* longer datagrams vanish; 0: none does */
    uint64_t last_arrival_ns; /* only reordered packets arrive earlier */
    uint32_t down;            /* faults that keep the link from working, counted */
};

/* Takes a datagram whose route[hop] is this link, and passes it on in time, or loses it. */
void sim_link_send(struct sim_link *link, struct sim_datagram *datagram);

#endif
