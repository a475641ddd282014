/*
 * Fabric: a leaf-spine network of hosts with one NIC each: every leaf has a link to each of its hosts and to each
 * spine. All queues are at outputs. The entropy of a packet selects its spine: ECMP where all packets of a connection
 * have the same entropy, spraying where each has its own.
 */
#pragma once

#include "fabric/transport.h"
#include "sim/link.h"

enum { SIM_PROTOCOLS = 2 };

struct sim_fabric_config {
    uint32_t leaves, hosts_per_leaf, spines;
    uint32_t others_per_leaf;   /* hosts of the background; their numbers follow those of the job's hosts */
    double host_bps, spine_bps; /* of a link between host and leaf, and between leaf and spine */
    uint64_t delay_ns;          /* of every link */
    uint64_t port_bytes;        /* limit of one port of a switch */
    uint64_t switch_bytes;      /* shared by the ports of one switch; 0: not shared */
    uint64_t mark_us; /* ECN: queue of a class, as time on its link, above which packets are marked; 0: never */
};

struct sim_fabric {
    struct sim_fabric_config config;
    struct sim_medium medium;
    uint32_t hosts, others, link_count;
    struct sim_link *links;
    struct sim_link *nic, *port; /* by host, others included: into its leaf, and from there */
    struct sim_link *up, *down;  /* by leaf * spines + spine */
    struct sim_buffer *buffers;  /* of the leaves, then of the spines */
    struct sim_transport *transports[SIM_PROTOCOLS];
};

void sim_fabric_init(struct sim_fabric *fabric, const struct sim_fabric_config *config, struct sim_clock *clock,
                     struct sim_trace *trace, uint64_t seed);
void sim_fabric_free(struct sim_fabric *fabric);

/* An empty datagram with room for SIM_FABRIC_HEAD_BYTES. `length` may be more: payload is not carried. */
enum { SIM_FABRIC_HEAD_BYTES = 640 };
struct sim_datagram *sim_fabric_take(struct sim_fabric *fabric);
/* Sends a datagram; from, to, protocol, priority, ecn and length are set. */
void sim_fabric_send(struct sim_fabric *fabric, struct sim_datagram *datagram, uint64_t entropy);

struct sim_fabric_counts {
    uint64_t sent, marked, selected, overflowed, most_port_bytes;
};
struct sim_fabric_counts sim_fabric_count(const struct sim_fabric *fabric);
