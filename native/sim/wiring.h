/*
 * Wiring: how the endpoints and links of a seed differ from plain ones: sizes of packets, keys of pairs of ranks, the
 * numbers of their first packets, credit, switches that mark packets. It has a stream of chance of its own.
 */
#ifndef CL_SIM_WIRING_H
#define CL_SIM_WIRING_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct cl_endpoint;

struct sim_wiring {
    uint32_t *datagram_bytes; /* by rank: its largest datagram */
    bool keys;                /* every pair of ranks has a key of its own */
    uint64_t first_number;    /* of the packets and acknowledgements of each path: they wrap soon; 0: they do not */
    uint64_t *credit_bytes;   /* by rank: that it grants (credit.h); 0: no credit */
    uint32_t unscheduled_bytes;
    double mark; /* the share of a queue's room above which a switch marks packets (ECN); 0: none does */
    bool drops;  /* and drops those that may be lost */
};

/* `plain`: every rank has the same. */
void sim_wiring_draw(struct sim_wiring *wiring, uint64_t seed, uint32_t world, uint32_t datagram_bytes, bool plain);
void sim_wiring_free(struct sim_wiring *wiring);

/* The largest datagram between two ranks. */
uint32_t sim_wiring_datagram_bytes(const struct sim_wiring *wiring, uint32_t a, uint32_t b);
/* Sets a peer up that rank `self` has added to its endpoint. False when the endpoint refuses it. */
bool sim_wiring_set_up(const struct sim_wiring *wiring, uint64_t seed, struct cl_endpoint *endpoint, uint16_t self,
                       uint16_t peer);
/* Prints what is not plain. */
void sim_wiring_print(const struct sim_wiring *wiring, uint32_t world, FILE *file);

#endif
