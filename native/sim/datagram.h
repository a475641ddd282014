/*
 * Datagram: one packet on its way, and the pool of all packets.
 */
#ifndef CL_SIM_DATAGRAM_H
#define CL_SIM_DATAGRAM_H

#include <stdint.h>

#include "sim/clock.h"

enum { SIM_HOPS_MAX = 4 };

/* The ECN bits of the IP header. Only queues of switches read them. */
enum sim_ecn { SIM_NOT_ECT, SIM_ECT, SIM_CE };

struct sim_link;

struct sim_datagram {
    struct sim_event event;    /* its arrival at the end of a link */
    struct sim_datagram *next; /* in a queue, an inbox or the pool */
    struct sim_datagram *made; /* the one allocated before it */
    struct sim_link *route[SIM_HOPS_MAX];
    uint8_t hops, hop; /* links of the route; the current one */
    uint8_t priority;
    uint8_t ecn;             /* enum sim_ecn */
    uint8_t protocol;        /* where several share the links: the index of the protocol that sent it */
    uint16_t from, to, path; /* `to` is a rank */
    uint32_t length;
    uint64_t arrived_ns;
    uint8_t bytes[];
};

struct sim_pool {
    uint32_t datagram_bytes; /* size of the largest datagram */
    struct sim_datagram *spare, *made;
    uint64_t used;
};

/* All but the bytes is zero. */
struct sim_datagram *sim_pool_take(struct sim_pool *pool);
/* A copy. */
struct sim_datagram *sim_pool_copy(struct sim_pool *pool, const struct sim_datagram *datagram);
void sim_pool_give(struct sim_pool *pool, struct sim_datagram *datagram);
/* Frees all datagrams, wherever they are. */
void sim_pool_free(struct sim_pool *pool);

#endif
