/*
 * A small network in virtual time for tests of the core: endpoints with one interface per path, each with an egress
 * link and an ingress port (rate, drop-tail buffer), a propagation delay between them, and faults: random loss,
 * reordering, duplication, dead interfaces, and hosts that sleep. Deterministic: one seeded generator, ties in order of
 * creation.
 */
#ifndef CL_TESTS_NETWORK_H
#define CL_TESTS_NETWORK_H

#include <stdlib.h>
#include <string.h>

#include "protocol/endpoint.h"

enum {
    NETWORK_ENDPOINTS_MAX = 8,
    NETWORK_PATHS_MAX = 4,
    NETWORK_DATAGRAM_BYTES = 1472,
    NETWORK_OVERHEAD_BYTES = 42, /* Ethernet, IP and UDP headers */
    NETWORK_BATCH = 32,
};

struct network_link {
    double ns_per_byte;
    uint64_t free_ns;        /* when what is queued will have left */
    uint64_t urgent_free_ns; /* the same of packets of class 0, where those go first */
    bool priorities;
    double buffer_bytes;
    double mark_bytes; /* of the queue, above which packets are marked (ECN); 0: never */
    bool dead;
};

struct network_packet {
    uint64_t at_ns;
    uint64_t order;
    uint64_t received_us;
    enum { AT_INGRESS, AT_HOST, RUN_HOST } event;
    uint16_t to, path;
    bool urgent;
    uint32_t length;
    bool marked;
    struct network_packet *next;
    uint8_t bytes[NETWORK_DATAGRAM_BYTES];
};

struct network_host {
    struct cl_endpoint *endpoint;
    struct network_packet *inbox, **inbox_tail;
    uint64_t awake_ns; /* it cannot run before */
    uint64_t run_ns;   /* earliest RUN_HOST event already planned */
    bool dead;
    uint32_t completed, failed;
    int last_status;
    uint64_t last_completed_us;
    void (*on_completion)(struct network_host *host, const struct cl_completion *completion);
    void *argument;
};

struct network {
    uint64_t now_ns, order, random;
    uint32_t host_count, path_count;
    struct network_host hosts[NETWORK_ENDPOINTS_MAX];
    struct network_link egress[NETWORK_ENDPOINTS_MAX][NETWORK_PATHS_MAX];
    struct network_link ingress[NETWORK_ENDPOINTS_MAX][NETWORK_PATHS_MAX];
    uint64_t delay_ns;
    bool (*drops)(struct network *network, uint32_t from, const struct cl_datagram *datagram); /* losses by choice */
    double loss, duplication, reordering;                                                      /* probabilities */
    uint64_t reordering_ns;                                                                    /* largest extra delay */
    uint64_t sleep_ns; /* hosts sleep up to that long after each run */
    struct network_packet **heap;
    uint32_t heap_count, heap_capacity;
    struct network_packet *spare;
    uint64_t packets, drops_full, drops_random, wire_bytes;
    void *argument; /* for `drops` */
};

/* xorshift64*: in [0, 1) */
static inline double network_random(struct network *network)
{
    uint64_t x = network->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    network->random = x;
    return (double)((x * 0x2545F4914F6CDD1Du) >> 11) / 9007199254740992.0;
}

static inline bool network_earlier(const struct network_packet *a, const struct network_packet *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static inline void network_schedule(struct network *network, struct network_packet *packet, uint64_t at_ns)
{
    if (network->heap_count == network->heap_capacity) {
        network->heap_capacity = network->heap_capacity ? 2 * network->heap_capacity : 256;
        network->heap = realloc(network->heap, network->heap_capacity * sizeof(struct network_packet *));
    }
    packet->at_ns = at_ns;
    packet->order = network->order++;
    uint32_t slot = network->heap_count++;
    for (; slot && network_earlier(packet, network->heap[(slot - 1) / 2]); slot = (slot - 1) / 2)
        network->heap[slot] = network->heap[(slot - 1) / 2];
    network->heap[slot] = packet;
}

static inline struct network_packet *network_pop(struct network *network)
{
    struct network_packet *first = network->heap[0], *last = network->heap[--network->heap_count];
    uint32_t slot = 0;
    for (uint32_t child; (child = 2 * slot + 1) < network->heap_count; slot = child) {
        if (child + 1 < network->heap_count && network_earlier(network->heap[child + 1], network->heap[child]))
            child++;
        if (!network_earlier(network->heap[child], last))
            break;
        network->heap[slot] = network->heap[child];
    }
    network->heap[slot] = last;
    return first;
}

static inline struct network_packet *network_packet_new(struct network *network)
{
    struct network_packet *packet = network->spare;
    if (packet)
        network->spare = packet->next;
    else
        packet = malloc(sizeof(*packet));
    packet->next = NULL;
    packet->urgent = false;
    return packet;
}

static inline void network_packet_free(struct network *network, struct network_packet *packet)
{
    packet->next = network->spare;
    network->spare = packet;
}

/* True, and *left_ns when its last bit is through, unless the buffer is full. */
static inline bool network_pass(struct network *network, struct network_link *link, uint32_t length, bool urgent,
                                uint64_t at_ns, uint64_t *left_ns)
{
    uint32_t wire_bytes = length + NETWORK_OVERHEAD_BYTES;
    urgent = urgent && link->priorities;
    uint64_t free_ns = urgent ? link->urgent_free_ns : link->free_ns;
    uint64_t start_ns = free_ns > at_ns ? free_ns : at_ns;
    if (link->ns_per_byte > 0 && (double)(start_ns - at_ns) / link->ns_per_byte + wire_bytes > link->buffer_bytes) {
        network->drops_full++;
        return false;
    }
    uint64_t takes_ns = (uint64_t)(link->ns_per_byte * wire_bytes);
    *left_ns = start_ns + takes_ns;
    link->free_ns = (link->free_ns > at_ns ? link->free_ns : at_ns) + takes_ns;
    if (urgent)
        link->urgent_free_ns = *left_ns;
    return !link->dead;
}

static inline uint64_t network_now_us(const struct network *network)
{
    return network->now_ns / 1000;
}

static inline void network_wake(struct network *network, uint32_t host_index, uint64_t at_ns)
{
    struct network_host *host = &network->hosts[host_index];
    if (at_ns < host->awake_ns)
        at_ns = host->awake_ns;
    if (at_ns < network->now_ns)
        at_ns = network->now_ns;
    if (at_ns >= host->run_ns)
        return;
    host->run_ns = at_ns;
    struct network_packet *event = network_packet_new(network);
    event->event = RUN_HOST;
    event->to = (uint16_t)host_index;
    network_schedule(network, event, at_ns);
}

static inline void network_emit(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    uint32_t length = datagram->head_length + datagram->payload_length;
    bool urgent = datagram->priority == 0;
    network->packets++;
    network->wire_bytes += length + NETWORK_OVERHEAD_BYTES;
    uint64_t at_ns;
    if (!network_pass(network, &network->egress[from][datagram->path], length, urgent, network->now_ns, &at_ns))
        return;
    if (network_random(network) < network->loss || (network->drops && network->drops(network, from, datagram))) {
        network->drops_random++;
        return;
    }
    int copies = network_random(network) < network->duplication ? 2 : 1;
    for (int i = 0; i < copies; i++) {
        struct network_packet *packet = network_packet_new(network);
        packet->event = AT_INGRESS;
        packet->to = datagram->peer;
        packet->path = datagram->path;
        packet->urgent = urgent;
        packet->length = length;
        packet->marked = false;
        memcpy(packet->bytes, datagram->head, datagram->head_length);
        if (datagram->payload_length)
            memcpy(packet->bytes + datagram->head_length, datagram->payload, datagram->payload_length);
        at_ns += network->delay_ns;
        if (network_random(network) < network->reordering)
            at_ns += (uint64_t)(network_random(network) * (double)network->reordering_ns);
        network_schedule(network, packet, at_ns);
    }
}

static inline void network_run_host(struct network *network, uint32_t index)
{
    static struct cl_datagram batch[NETWORK_BATCH];
    struct network_host *host = &network->hosts[index];
    uint64_t now_us = network_now_us(network);
    while (host->inbox) {
        struct network_packet *packet = host->inbox;
        host->inbox = packet->next;
        cl_endpoint_receive(host->endpoint, packet->bytes, packet->length, packet->marked, packet->received_us, now_us);
        network_packet_free(network, packet);
    }
    host->inbox_tail = &host->inbox;
    if (cl_endpoint_next_timeout(host->endpoint) <= now_us)
        cl_endpoint_timeout(host->endpoint, now_us);
    struct cl_completion completion;
    while (cl_endpoint_next_completion(host->endpoint, &completion)) {
        host->completed++;
        host->failed += completion.status != CL_OK;
        host->last_status = completion.status;
        host->last_completed_us = now_us;
        if (host->on_completion)
            host->on_completion(host, &completion);
    }
    size_t count;
    while ((count = cl_endpoint_send(host->endpoint, now_us, batch, NETWORK_BATCH)) > 0)
        for (size_t i = 0; i < count; i++)
            network_emit(network, index, &batch[i]);
    if (network->sleep_ns)
        host->awake_ns = network->now_ns + (uint64_t)(network_random(network) * (double)network->sleep_ns);
    uint64_t timeout_us = cl_endpoint_next_timeout(host->endpoint);
    if (timeout_us != UINT64_MAX)
        network_wake(network, index, timeout_us * 1000);
}

/* Runs one event; false when there is none before until_us (the time is then until_us). */
static inline bool network_step(struct network *network, uint64_t until_us)
{
    if (!network->heap_count || network->heap[0]->at_ns > until_us * 1000) {
        if (network->now_ns < until_us * 1000)
            network->now_ns = until_us * 1000;
        return false;
    }
    struct network_packet *packet = network_pop(network);
    network->now_ns = packet->at_ns;
    struct network_host *host = &network->hosts[packet->to];
    uint64_t left_ns;
    if (packet->event == AT_INGRESS && !host->dead &&
        network_pass(network, &network->ingress[packet->to][packet->path], packet->length, packet->urgent,
                     network->now_ns, &left_ns)) {
        const struct network_link *port = &network->ingress[packet->to][packet->path];
        double queued_bytes = (double)(left_ns - network->now_ns) / port->ns_per_byte;
        packet->marked = port->mark_bytes > 0 && queued_bytes > port->mark_bytes;
        packet->event = AT_HOST;
        network_schedule(network, packet, left_ns);
    } else if (packet->event == AT_HOST && !host->dead) {
        packet->received_us = network_now_us(network);
        packet->next = NULL;
        *host->inbox_tail = packet;
        host->inbox_tail = &packet->next;
        network_wake(network, packet->to, network->now_ns);
    } else {
        bool run = packet->event == RUN_HOST && !host->dead && host->run_ns == packet->at_ns;
        uint16_t to = packet->to;
        network_packet_free(network, packet);
        if (run) {
            host->run_ns = UINT64_MAX;
            if (network->now_ns < host->awake_ns)
                network_wake(network, to, host->awake_ns);
            else
                network_run_host(network, to);
        }
    }
    return true;
}

static inline void network_run_until(struct network *network, uint64_t until_us)
{
    while (network_step(network, until_us))
        ;
}

/* Runs until every host has `completions`, or until_us; the former is true. */
static inline bool network_run_completions(struct network *network, uint32_t completions, uint64_t until_us)
{
    for (;;) {
        bool all = true;
        for (uint32_t i = 0; i < network->host_count; i++)
            all = all && (network->hosts[i].dead || network->hosts[i].completed >= completions);
        if (all)
            return true;
        if (!network_step(network, until_us))
            return false;
    }
}

static inline void network_set_link(struct network_link *link, double mbit_per_s, uint32_t buffer_packets)
{
    link->ns_per_byte = mbit_per_s > 0 ? 8000.0 / mbit_per_s : 0;
    link->buffer_bytes = (double)buffer_packets * (NETWORK_DATAGRAM_BYTES + NETWORK_OVERHEAD_BYTES);
}

/* mbit_per_s 0: infinitely fast. All peers know each other. */
static inline struct network *network_new(uint32_t hosts, uint16_t paths, double mbit_per_s, uint32_t buffer_packets,
                                          size_t unexpected_limit_bytes, uint64_t seed)
{
    struct network *network = calloc(1, sizeof(*network));
    network->host_count = hosts;
    network->path_count = paths;
    network->delay_ns = 100000;
    network->now_ns = 5000000000; /* clocks do not start at 0 */
    network->random = (seed + 1) * 0x9E3779B97F4A7C15u;
    for (uint32_t i = 0; i < hosts; i++) {
        struct cl_endpoint_config config = {.job = 77,
                                            .self = (uint16_t)i,
                                            .epoch = 1,
                                            .datagram_bytes = NETWORK_DATAGRAM_BYTES,
                                            .unexpected_limit_bytes = unexpected_limit_bytes,
                                            .congestion = "delay",
                                            .seed = (uint32_t)seed + i};
        cl_endpoint_create(&config, &network->hosts[i].endpoint);
        network->hosts[i].inbox_tail = &network->hosts[i].inbox;
        network->hosts[i].run_ns = UINT64_MAX;
        for (uint16_t j = 0; j < hosts; j++)
            if (j != i)
                cl_endpoint_add_peer(network->hosts[i].endpoint, j, paths);
        for (uint16_t path = 0; path < paths; path++) {
            network_set_link(&network->egress[i][path], mbit_per_s, buffer_packets);
            network_set_link(&network->ingress[i][path], mbit_per_s, buffer_packets);
        }
        network_wake(network, i, network->now_ns);
    }
    return network;
}

static inline void network_free(struct network *network)
{
    for (uint32_t i = 0; i < network->host_count; i++) {
        while (network->hosts[i].inbox) {
            struct network_packet *packet = network->hosts[i].inbox;
            network->hosts[i].inbox = packet->next;
            free(packet);
        }
        cl_endpoint_destroy(network->hosts[i].endpoint);
    }
    while (network->heap_count)
        free(network_pop(network));
    while (network->spare) {
        struct network_packet *packet = network->spare;
        network->spare = packet->next;
        free(packet);
    }
    free(network->heap);
    free(network);
}

#endif
