/*
 * DLCP: the production core (protocol/endpoint.h) on every host of a fabric. A host is infinitely fast: its engine has
 * a turn at once whenever a packet comes, a message is posted or a timer is due.
 *
 * Payload is not carried, only its length. Packets that a switch may drop first leave as not ECN-capable, the others as
 * ECN-capable, which is what the wire does. The n-th path of a peer differs from the others by its entropy, as with
 * source ports: ECMP may or may not give it another spine.
 */
#ifndef CL_FABRIC_DLCP_H
#define CL_FABRIC_DLCP_H

#include "fabric/fabric.h"
#include "sim/driver.h"

struct sim_dlcp_config {
    uint32_t mtu;    /* of the IP packet */
    uint32_t paths;  /* per peer */
    bool sprays;     /* every packet has entropy of its own; else every path has */
    bool priorities; /* else all packets are of one class */
    bool selective;  /* else no packet is to be dropped before others */
    /* What the core takes for a microsecond. Its constants are made for hosts that share their cores and take about a
     * millisecond to answer; hosts that take no time may have them in proportion. 1000: as they are. */
    uint32_t tick_ns;
};

struct sim_dlcp_host {
    struct sim_driver driver; /* the first member: drivers are cast to hosts */
    struct sim_dlcp *dlcp;
    uint16_t id;
    bool running; /* a turn is under way, and sends what is posted meanwhile */
};

struct sim_dlcp {
    struct sim_transport transport;
    struct sim_dlcp_config config;
    struct sim_fabric *fabric;
    uint8_t protocol;
    struct sim_dlcp_host *hosts;
    uint64_t sent;   /* packets */
    uint8_t *packet; /* what a host is given of a datagram: its head, and as many bytes after it as it says */
};

void sim_dlcp_init(struct sim_dlcp *dlcp, const struct sim_dlcp_config *config, struct sim_fabric *fabric,
                   uint8_t protocol);
void sim_dlcp_free(struct sim_dlcp *dlcp);

/* The sum over all hosts. */
struct cl_endpoint_stats sim_dlcp_stats(const struct sim_dlcp *dlcp);

#endif
