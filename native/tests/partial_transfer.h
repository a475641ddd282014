/*
 * Partial transfer: a message that may lose packets, over network.h. Both ends must report the same missing ranges,
 * within the loss bound, and all other bytes must arrive exactly once.
 */
#pragma once

#include "protocol/partial.h"
#include "tests/check.h"
#include "tests/network.h"

enum { ROOM = 64 << 20, SECOND_US = 1000000, PAYLOAD = 1432, RANGES_MAX = 4096 };

struct end {
    bool done;
    int status;
    uint64_t at_us;
    uint32_t count;
    struct cl_range missing[RANGES_MAX];
};

struct transfer {
    struct network *network;
    uint32_t from, to, length;
    struct cl_message_id id;
    struct cl_qos qos;
    uint8_t *sent, *received;
    struct end sender, receiver;
};

static inline struct transfer *make(struct network *network, uint32_t from, uint32_t to, uint32_t index,
                                    uint32_t length, struct cl_qos qos)
{
    struct transfer *t = calloc(1, sizeof(*t));
    *t = (struct transfer){
        .network = network, .from = from, .to = to, .length = length, .id = {9, 1, index}, .qos = qos};
    t->sent = malloc(length + 1);
    t->received = calloc(1, length + 1);
    for (uint32_t i = 0; i < length; i++)
        t->sent[i] = (uint8_t)(1 + (i * 31 + (i >> 8) * 7 + index * 17) % 255); /* never 0 */
    return t;
}

static inline void transfer_free(struct transfer *t)
{
    free(t->sent);
    free(t->received);
    free(t);
}

static inline void transfer_leave(struct transfer *const *transfer)
{
    transfer_free(*transfer);
}

#define SCOPED_TRANSFER SCOPED(transfer_leave) struct transfer

static inline void on_completion(struct network_host *host, const struct cl_completion *completion)
{
    struct end *end = completion->context;
    struct network *network = host->argument;
    CHECK(!end->done);
    *end = (struct end){.done = true, .status = completion->status, .at_us = network_now_us(network)};
    for (uint32_t i = 0; i < completion->missing_count && i < RANGES_MAX; i++)
        end->missing[end->count++] = completion->missing[i];
}

static inline void post_send(struct transfer *t)
{
    CHECK_EQ(cl_endpoint_post_send(t->network->hosts[t->from].endpoint, (uint16_t)t->to, t->id, t->sent, t->length,
                                   &t->qos, network_now_us(t->network), &t->sender),
             CL_OK);
    network_wake(t->network, t->from);
}

static inline void post_receive(struct transfer *t)
{
    struct cl_sink sink = {.target = t->received, .deliver = network_add};
    CHECK_EQ(cl_endpoint_post_receive(t->network->hosts[t->to].endpoint, (uint16_t)t->from, t->id, sink, t->length,
                                      &t->qos, network_now_us(t->network), &t->receiver),
             CL_OK);
    network_wake(t->network, t->to);
}

static inline struct network *open_network(uint32_t hosts, uint16_t paths, double mbit_per_s, size_t unexpected_bytes,
                                           uint64_t seed)
{
    struct network *network = network_new(hosts, paths, mbit_per_s, 150, unexpected_bytes, seed);
    for (uint32_t i = 0; i < hosts; i++) {
        network->hosts[i].on_completion = on_completion;
        network->hosts[i].argument = network;
    }
    return network;
}

static inline bool run_until_done(struct transfer *const *transfers, uint32_t count, uint64_t limit_us)
{
    struct network *network = transfers[0]->network;
    uint64_t until_us = network_now_us(network) + limit_us;
    for (;;) {
        bool all = true;
        for (uint32_t i = 0; i < count; i++)
            all = all && transfers[i]->sender.done && transfers[i]->receiver.done;
        if (all || !network_step(network, until_us))
            return all;
    }
}

/* Checks a message that succeeded; returns the number of its missing packets. */
static inline uint32_t check_ended(const struct transfer *t)
{
    const struct end *a = &t->sender, *b = &t->receiver;
    CHECK(a->done && b->done);
    CHECK_EQ(a->status, CL_OK);
    CHECK_EQ(b->status, CL_OK);
    CHECK_EQ(a->count, b->count);
    CHECK(a->count != b->count || memcmp(a->missing, b->missing, a->count * sizeof(*a->missing)) == 0);
    uint32_t packet = PAYLOAD - (t->qos.blocks.encoded_bytes ? PAYLOAD % t->qos.blocks.encoded_bytes : 0);
    uint32_t packets = (t->length + packet - 1) / packet, missing = 0;
    uint64_t counted_to = 0;
    bool intact = true;
    for (uint32_t i = 0; i < b->count; i++) {
        const struct cl_range *range = &b->missing[i];
        CHECK(range->start < range->end && range->end <= t->length && range->start % packet == 0);
        missing += (uint32_t)((range->end - range->start + packet - 1) / packet);
        intact = intact && memcmp(t->sent + counted_to, t->received + counted_to, range->start - counted_to) == 0;
        for (uint64_t at = range->start; at < range->end; at++)
            intact = intact && t->received[at] == 0;
        counted_to = range->end;
    }
    intact = intact && memcmp(t->sent + counted_to, t->received + counted_to, t->length - counted_to) == 0;
    CHECK(intact);
    CHECK(missing <= packets * t->qos.loss_bound + 1e-9);
    return missing;
}

static inline struct cl_qos may_lose(double loss_bound)
{
    return (struct cl_qos){.loss_bound = loss_bound};
}

/* Sends `count` messages from each host to each other; returns the number of missing packets. */
static inline uint32_t exchange(struct network *network, uint32_t count, uint32_t length, struct cl_qos qos)
{
    enum { TRANSFERS_MAX = 512 };
    static struct transfer *transfers[TRANSFERS_MAX];
    uint32_t made = 0, missing = 0;
    for (uint32_t from = 0; from < network->host_count; from++)
        for (uint32_t to = 0; to < network->host_count; to++)
            for (uint32_t index = 0; from != to && index < count; index++)
                transfers[made++] = make(network, from, to, index, length + index, qos);
    for (uint32_t i = 0; i < made; i++) {
        post_send(transfers[i]);
        post_receive(transfers[i]);
    }
    CHECK(run_until_done(transfers, made, 20 * SECOND_US));
    network_run_until(network, network_now_us(network) + SECOND_US);
    for (uint32_t i = 0; i < made; i++) {
        missing += check_ended(transfers[i]);
        transfer_free(transfers[i]);
    }
    for (uint32_t i = 0; i < network->host_count; i++)
        for (uint16_t peer = 0; peer < network->host_count; peer++)
            CHECK(peer == i || network->hosts[i].driver.dead ||
                  network->hosts[i].endpoint->peers.list[peer]->stops.first == NULL); /* nothing is kept */
    return missing;
}

static inline const struct cl_engine_stats *stats(const struct network *network, uint32_t host)
{
    return cl_endpoint_stats(network->hosts[host].endpoint);
}
