/*
 * Network: endpoints on the simulator's network (sim/network.h), for tests of the protocol in virtual time: one host
 * per endpoint unless they move together, one interface per path. Tests set rates, buffers, noise and failures on the
 * links. Deterministic: a seed determines a run.
 */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "sim/driver.h"
#include "sim/network.h"
#include "tests/check.h"

enum {
    NETWORK_ENDPOINTS_MAX = 16,
    NETWORK_PATHS_MAX = SIM_PATHS_MAX,
    NETWORK_DATAGRAM_BYTES = 1472,
    NETWORK_OTHERS = 1, /* sim_datagram.protocol of a test's own traffic: it vanishes at its host */
};

static const struct cl_qos RELIABLE = {0}; /* a message that may lose no packet, of the most urgent class */

struct network_host {
    struct sim_driver driver; /* the first member: drivers are cast to hosts */
    struct cl_endpoint *endpoint;
    struct network *network;
    uint32_t completed, failed;
    int last_status;
    uint64_t last_completed_us;
    void (*on_completion)(struct network_host *host, const struct cl_completion *completion);
    void *argument;
};

struct network {
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_network links;
    struct sim_random random;
    uint32_t host_count;
    struct network_host hosts[NETWORK_ENDPOINTS_MAX];
    uint32_t ranks;                       /* endpoints per host: 1 at first; host h has the links of number h */
    uint64_t sleep_ns;                    /* hosts sleep up to that long after each turn */
    uint32_t full[NETWORK_ENDPOINTS_MAX]; /* by host: a bit per path whose port takes no datagram */
    /* It is called with each datagram that is to leave; true: it is lost. */
    bool (*drops)(struct network *network, uint32_t from, const struct cl_datagram *datagram);
    /* It is called with each datagram that reaches a host, before the host has it. */
    void (*meddle)(struct network *network, struct sim_datagram *datagram);
    /* It is called with each datagram of NETWORK_OTHERS that reaches its host; NULL: nothing happens. */
    void (*others)(const struct sim_datagram *datagram);
    void *argument; /* for drops and meddle */
};

/* mbit_per_s 0: infinitely fast. Links take 100 us; all peers know each other. */
struct network *network_new(uint32_t hosts, uint16_t paths, double mbit_per_s, uint32_t buffer_packets,
                            size_t unexpected_limit_bytes, uint64_t seed);
/* The same with the rate control of that name; NULL: the product's. */
struct network *network_new_with(const char *rate_control, uint32_t hosts, uint16_t paths, double mbit_per_s,
                                 uint32_t buffer_packets, size_t unexpected_limit_bytes, uint64_t seed);
void network_free(struct network *network);

static inline void network_leave(struct network *const *network)
{
    network_free(*network);
}

#define SCOPED_NETWORK SCOPED(network_leave) struct network

struct sim_link *network_egress(struct network *network, uint32_t host, uint32_t path);
struct sim_link *network_ingress(struct network *network, uint32_t host, uint32_t path);
/* The buffer has room for so many packets, the one under transmission included. */
void network_set_link(struct sim_link *link, double mbit_per_s, uint32_t buffer_packets);
/* What happens to packets on their way between any two hosts. */
void network_set_noise(struct network *network, struct sim_noise noise);
void network_set_delay(struct network *network, uint64_t delay_us);

uint64_t network_now_us(const struct network *network);
/* [0, 1) */
double network_random(struct network *network);
/* The host takes a turn now. */
void network_wake(struct network *network, uint32_t host);
/* The host takes no turn for so long. */
void network_sleep(struct network *network, uint32_t host, uint64_t us);

/* Lets one event happen; false when there is none before until_us (the time is then until_us). */
bool network_step(struct network *network, uint64_t until_us);
void network_run_until(struct network *network, uint64_t until_us);
/* Runs until every live host has `completions` (true), or until_us (false). */
bool network_run_completions(struct network *network, uint32_t completions, uint64_t until_us);

struct network_message {
    uint16_t from, to;
    struct cl_message_id id;
    const void *source;
    uint8_t *target;
    uint32_t length;
    struct cl_qos qos;
};
/* Posts both ends of a message without a context, and wakes both hosts. */
void network_post(struct network *network, struct network_message message);
/* Adds, as a cl_sink.deliver, so that a second delivery shows. */
void network_add(void *target, size_t offset, const void *payload, size_t length, void *argument);

/* A datagram as it leaves a host: to be sent by the test. */
struct sim_datagram *network_datagram(struct network *network, uint32_t from, const struct cl_datagram *datagram);
/* Whether the host does not hold the peer for lost. */
bool network_sees(const struct network *network, uint32_t host, uint16_t peer);
/* Packets lost for want of room in a buffer. */
uint64_t network_overflows(const struct network *network);
