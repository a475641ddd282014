/*
 * Network: the links, and the routes over them. Every host has one interface per path, with an egress and an ingress
 * link; with `trunks` the hosts are on two switches, and packets between the switches cross a third link. Another
 * topology is another way to fill sim_datagram.route: nothing else knows the topology.
 */
#ifndef CL_SIM_NETWORK_H
#define CL_SIM_NETWORK_H

#include "sim/link.h"

enum { SIM_PATHS_MAX = 4 };

struct sim_network {
    struct sim_medium medium;
    uint32_t hosts, paths;
    bool trunks;
    struct sim_link *egress, *ingress; /* host * paths + path */
    struct sim_link *trunk[2];         /* by direction, then by path */
    uint8_t *cut;                      /* from host * hosts + to host: a bit per path; NULL: nothing is cut */
};

/* Makes the links; the caller sets their rates, buffers and noise (see scenario.h). */
void sim_network_init(struct sim_network *network, struct sim_clock *clock, struct sim_trace *trace, uint64_t seed,
                      uint32_t hosts, uint32_t paths, bool trunks, uint32_t datagram_bytes);
void sim_network_free(struct sim_network *network);

/* Sends a datagram from host to host; from, to, path, priority, length and bytes are set. */
void sim_network_send(struct sim_network *network, struct sim_datagram *datagram, uint32_t from_host, uint32_t to_host);
/* Cuts, or restores, one direction between two hosts on a path. */
void sim_network_cut(struct sim_network *network, uint32_t from_host, uint32_t to_host, uint32_t path, bool cut);

#endif
