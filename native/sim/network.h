/*
 * Network: the links, and the routes over them. Every host has one interface per path, with an egress and an ingress
 * link; with `trunks` the hosts are on two switches, and packets between the switches cross a third link. Another
 * topology is another way to fill sim_datagram.route: nothing else knows the topology.
 */
#ifndef CL_SIM_NETWORK_H
#define CL_SIM_NETWORK_H

#include "sim/link.h"
#include "sim/trace.h"

enum { SIM_PATHS_MAX = 4 };

/* Why a packet was lost. */
enum sim_loss {
    SIM_LOST_NOISE,    /* random loss, bursts, storms */
    SIM_LOST_QUEUE,    /* a queue in the network was full */
    SIM_LOST_CHECKSUM, /* corrupted, and dropped by the receiver's kernel */
    SIM_LOST_DOWN,     /* an interface was down */
    SIM_LOST_CUT,      /* this path between two hosts is cut */
    SIM_LOST_SOCKET,   /* the receiver's socket buffer was full */
    SIM_LOST_DEAD,     /* the receiver is dead */
    SIM_LOSSES,
};
const char *sim_loss_name(enum sim_loss loss);

struct sim_network_counts {
    uint64_t sent, delivered, lost[SIM_LOSSES], duplicated, reordered, corrupted;
};

struct sim_network {
    struct sim_clock *clock;
    struct sim_trace *trace;
    struct sim_random random;
    struct sim_pool pool;
    uint32_t hosts, paths;
    bool trunks;
    struct sim_link *egress, *ingress; /* host * paths + path */
    struct sim_link *trunk[2];         /* by direction, then by path */
    uint8_t *cut;                      /* from host * hosts + to host: a bit per path; NULL: nothing is cut */
    struct sim_network_counts counts;
    /* A datagram has reached its rank, which owns it now. */
    void (*deliver)(void *context, struct sim_datagram *datagram);
    void *context;
};

/* Makes the links; the caller sets their rates, buffers and noise (see scenario.h). */
void sim_network_init(struct sim_network *network, struct sim_clock *clock, struct sim_trace *trace, uint64_t seed,
                      uint32_t hosts, uint32_t paths, bool trunks, uint32_t datagram_bytes);
void sim_network_free(struct sim_network *network);

/* Sends a datagram from host to host; from, to, path, priority, length and bytes are set. */
void sim_network_send(struct sim_network *network, struct sim_datagram *datagram, uint32_t from_host, uint32_t to_host);
/* The datagram has passed its current link. */
void sim_network_forward(struct sim_datagram *datagram);
void sim_network_lose(struct sim_network *network, struct sim_datagram *datagram, enum sim_loss why, const char *where);

/* Cuts, or mends, one direction between two hosts on a path. */
void sim_network_cut(struct sim_network *network, uint32_t from_host, uint32_t to_host, uint32_t path, bool cut);

#endif
