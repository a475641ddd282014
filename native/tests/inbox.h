/* Inbox: numbered datagrams for tests of wires, and those that have come. */
#pragma once

#include <string.h>

#include "tests/check.h"
#include "wire/wire.h"

enum { MANY = 200, PAYLOAD_MOST = 1472 };

struct inbox {
    size_t count;
    size_t lengths[2 * MANY];
    uint8_t first[2 * MANY], last[2 * MANY];
    bool congested[2 * MANY];
    uint64_t received_us[2 * MANY];
};

/* What a wire hands its datagrams to; the context is the inbox. */
static inline void keep(void *context, const uint8_t *bytes, size_t length, bool congested, uint64_t received_us)
{
    struct inbox *inbox = context;
    if (inbox->count == 2 * MANY)
        return;
    inbox->received_us[inbox->count] = received_us;
    inbox->lengths[inbox->count] = length;
    inbox->congested[inbox->count] = congested;
    inbox->first[inbox->count] = length > 0 ? bytes[0] : 0;
    inbox->last[inbox->count++] = length > 0 ? bytes[length - 1] : 0;
}

static uint8_t payloads[MANY][PAYLOAD_MOST];

/* Datagram i: a head of 8 bytes that begin with i, and a payload that ends with i. */
static inline struct cl_wire_datagram make(size_t i, uint32_t link, uint32_t payload_length)
{
    static uint8_t heads[MANY][8];
    memset(heads[i], (int)(uint8_t)i, sizeof heads[i]);
    memset(payloads[i], (int)(uint8_t)i, payload_length);
    return (struct cl_wire_datagram){.link = link,
                                     .head_length = sizeof heads[i],
                                     .payload_length = payload_length,
                                     .head = heads[i],
                                     .payload = payloads[i]};
}

/* The datagrams have come in this order, and whole. */
static inline void check_inbox(const struct inbox *inbox, const struct cl_wire_datagram *sent, size_t count)
{
    CHECK_EQ(inbox->count, count);
    for (size_t i = 0; i < count && i < inbox->count; i++) {
        CHECK_EQ(inbox->lengths[i], sent[i].head_length + sent[i].payload_length);
        CHECK_EQ(inbox->first[i], sent[i].head[0]);
        CHECK_EQ(inbox->last[i], sent[i].head[0]);
    }
}
