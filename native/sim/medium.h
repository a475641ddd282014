/*
 * Medium: what all links of a network share: the clock, the datagrams, chance, counts, and the function that takes a
 * datagram at the end of its route.
 */
#ifndef CL_SIM_MEDIUM_H
#define CL_SIM_MEDIUM_H

#include "sim/clock.h"
#include "sim/datagram.h"
#include "sim/random.h"
#include "sim/trace.h"

/* Why a packet was lost. */
enum sim_loss {
    SIM_LOST_NOISE,    /* random loss, bursts, storms */
    SIM_LOST_QUEUE,    /* a queue in the network was full */
    SIM_LOST_CHECKSUM, /* corrupted, and dropped by the receiver's kernel */
    SIM_LOST_DOWN,     /* an interface was down */
    SIM_LOST_SIZE,     /* longer than the link carries */
    SIM_LOST_CUT,      /* this path between two hosts is cut */
    SIM_LOST_SOCKET,   /* the receiver's socket buffer was full */
    SIM_LOST_DEAD,     /* the receiver is dead */
    SIM_LOSSES,
};
const char *sim_loss_name(enum sim_loss loss);

struct sim_medium_counts {
    uint64_t sent, delivered, lost[SIM_LOSSES], duplicated, reordered, corrupted;
};

struct sim_medium {
    struct sim_clock *clock;
    struct sim_trace *trace;
    struct sim_random random;
    struct sim_pool pool;
    struct sim_medium_counts counts;
    /* A datagram has reached its rank, which owns it now. */
    void (*deliver)(void *context, struct sim_datagram *datagram);
    void *context;
};

void sim_medium_lose(struct sim_medium *medium, struct sim_datagram *datagram, enum sim_loss why, const char *where);

#endif
