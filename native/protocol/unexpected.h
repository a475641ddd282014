/*
 * Unexpected packets: copies of packets that came before their receive was posted, with a limit on their bytes over all
 * messages. Each message has its chain of them, in order of arrival.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_unexpected_packet {
    struct cl_unexpected_packet *next;
    uint32_t offset;
    uint16_t length;
    uint8_t flags; /* the packet's flags: see packet.h */
    uint8_t payload[];
};

struct cl_unexpected_chain {
    struct cl_unexpected_packet *first, *last;
};

struct cl_unexpected {
    size_t limit_bytes;
    size_t used_bytes;
    uint32_t payload_bytes;            /* payload of the largest packet */
    struct cl_unexpected_packet *free; /* kept for reuse: a rank that was late is often late again */
};

void cl_unexpected_init(struct cl_unexpected *unexpected, size_t limit_bytes, uint32_t payload_bytes);
/* Needs every chain to be dropped before. */
void cl_unexpected_free(struct cl_unexpected *unexpected);

/* False when there is no room. length is at most payload_bytes. */
bool cl_unexpected_put(struct cl_unexpected *unexpected, struct cl_unexpected_chain *chain, uint32_t offset,
                       uint8_t flags, const uint8_t *payload, uint16_t length);
/* The first packet of the chain, or NULL. It is the caller's until cl_unexpected_release. */
struct cl_unexpected_packet *cl_unexpected_take(struct cl_unexpected_chain *chain);
void cl_unexpected_release(struct cl_unexpected *unexpected, struct cl_unexpected_packet *packet);
void cl_unexpected_drop(struct cl_unexpected *unexpected, struct cl_unexpected_chain *chain);
