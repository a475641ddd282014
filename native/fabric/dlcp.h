/*
 * DLCP: the production endpoint (protocol/endpoint.h) on every host of a fabric. A host is infinitely fast: its
 * endpoint takes a turn at once whenever a packet comes, a message is posted or a timer is due.
 *
 * Datagrams carry the length of their payload, not the payload. Packets that a switch may drop first leave as not
 * ECN-capable, the others as ECN-capable, as on a real wire. Paths of a peer differ by their entropy, as by source
 * ports: ECMP may or may not give them different spines.
 */
#pragma once

#include "fabric/fabric.h"
#include "sim/driver.h"

struct sim_dlcp_config {
    uint32_t mtu;          /* of the IP packet */
    uint32_t paths;        /* per peer */
    bool sprays;           /* every packet has entropy of its own; else every path */
    bool priorities;       /* else all packets are of one class */
    uint64_t credit_bytes; /* that a host grants; 0: no credit */
    uint32_t unscheduled_bytes;
    const char *rate_control; /* its name; NULL: the product's */
    bool selective;           /* else no packet is to be dropped before others */
    /* Length of the endpoint's microsecond. The endpoint's constants suit hosts that share their cores and answer after
     * about a millisecond; hosts that answer at once may have them in proportion. 1000: the constants as they are. */
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
    uint8_t *packet; /* handed to a host: the head of a datagram, and as many bytes after it as the head says */
};

void sim_dlcp_init(struct sim_dlcp *dlcp, const struct sim_dlcp_config *config, struct sim_fabric *fabric,
                   uint8_t protocol);
void sim_dlcp_free(struct sim_dlcp *dlcp);

/* The sum over all hosts. */
struct cl_engine_stats sim_dlcp_stats(const struct sim_dlcp *dlcp);
