/*
 * Stash: copies of packets that came before their receive was posted, bounded in bytes over all messages. Each message
 * has its chain of them, in order of arrival.
 */
#ifndef CL_CORE_STASH_H
#define CL_CORE_STASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_stash_packet {
    struct cl_stash_packet *next;
    uint32_t offset;
    uint16_t length;
    uint8_t flags; /* of the packet: see packet.h */
    uint8_t payload[];
};

struct cl_stash_chain {
    struct cl_stash_packet *first, *last;
};

struct cl_stash {
    size_t limit_bytes;
    size_t used_bytes;
    uint32_t payload_bytes;       /* of the largest packet */
    struct cl_stash_packet *free; /* kept for reuse: a late rank is late again and again */
};

void cl_stash_init(struct cl_stash *stash, size_t limit_bytes, uint32_t payload_bytes);
/* Needs every chain to be dropped before. */
void cl_stash_free(struct cl_stash *stash);

/* False when there is no room. length is at most payload_bytes. */
bool cl_stash_put(struct cl_stash *stash, struct cl_stash_chain *chain, uint32_t offset, uint8_t flags,
                  const uint8_t *payload, uint16_t length);
/* The first packet of the chain, or NULL. It is the caller's until cl_stash_release. */
struct cl_stash_packet *cl_stash_take(struct cl_stash_chain *chain);
void cl_stash_release(struct cl_stash *stash, struct cl_stash_packet *packet);
void cl_stash_drop(struct cl_stash *stash, struct cl_stash_chain *chain);

#endif
