/*
 * Transfer: one message over network.h with a pattern of bytes that shows a missing, misplaced or repeated byte.
 */
#pragma once

#include "tests/check.h"
#include "tests/network.h"

enum { ROOM = 64 << 20, SECOND_US = 1000000 };

static inline uint8_t pattern(uint32_t from, uint32_t to, uint32_t index, size_t at)
{
    return (uint8_t)(at * 31 + (at >> 8) * 7 + from * 101 + to * 53 + index * 17);
}

struct transfer {
    uint32_t from, to, index, length;
    uint8_t *sent, *received;
};

static inline struct transfer *transfer_new(uint32_t from, uint32_t to, uint32_t index, uint32_t length)
{
    struct transfer *transfer = malloc(sizeof(*transfer));
    *transfer = (struct transfer){from, to, index, length, malloc(length + 1), calloc(1, length + 1)};
    for (size_t i = 0; i < length; i++)
        transfer->sent[i] = pattern(from, to, index, i);
    return transfer;
}

static inline void transfer_free(struct transfer *transfer)
{
    free(transfer->sent);
    free(transfer->received);
    free(transfer);
}

static inline void transfer_leave(struct transfer *const *transfer)
{
    transfer_free(*transfer);
}

#define SCOPED_TRANSFER SCOPED(transfer_leave) struct transfer

static inline void post_send(struct network *network, struct transfer *t, uint32_t sequence, uint8_t priority)
{
    struct cl_message_id id = {9, sequence, t->index};
    CHECK_EQ(cl_endpoint_post_send(network->hosts[t->from].endpoint, (uint16_t)t->to, id, t->sent, t->length,
                                   &(struct cl_qos){.priority = priority}, network_now_us(network), t),
             CL_OK);
    network_wake(network, t->from);
}

static inline void post_receive(struct network *network, struct transfer *t, uint32_t sequence)
{
    struct cl_message_id id = {9, sequence, t->index};
    struct cl_sink sink = {.target = t->received, .deliver = network_add};
    CHECK_EQ(cl_endpoint_post_receive(network->hosts[t->to].endpoint, (uint16_t)t->from, id, sink, t->length, &RELIABLE,
                                      network_now_us(network), t),
             CL_OK);
    network_wake(network, t->to);
}

/* Both ends of a transfer. */
static inline void post(struct network *network, struct transfer *t, uint32_t sequence)
{
    post_receive(network, t, sequence);
    post_send(network, t, sequence, 0);
}

static inline bool intact(const struct transfer *t)
{
    return memcmp(t->sent, t->received, t->length) == 0;
}

/* All have arrived whole. */
static inline void finish_transfers(struct transfer *const *transfers, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        CHECK(intact(transfers[i]));
        transfer_free(transfers[i]);
    }
}

static inline uint64_t network_failures(const struct network *network)
{
    uint64_t failures = 0;
    for (uint32_t i = 0; i < network->host_count; i++)
        failures += network->hosts[i].failed;
    return failures;
}
