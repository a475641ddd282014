/*
 * Fragments: a datagram that its path does not carry as a whole (mtu.h) leaves in parts. A fragment is a datagram with
 * a header and a tag of its own; it names the packet number of the whole, its place in it and the length of the whole.
 * The receiver puts the whole together and takes it like any other; the acknowledgement and the loss of a packet are
 * those of the whole.
 */
#pragma once

#include "protocol/ranges.h"

enum { CL_FRAGMENTS_WHOLES = 8 /* datagrams of one path that are put together at a time */ };

/* A datagram that is put together. */
struct cl_whole {
    uint8_t *bytes;
    uint32_t length, capacity; /* length 0: unused */
    uint64_t number;
    uint64_t turn; /* when it was begun: the oldest gives way */
    bool marked;   /* a switch has marked one of its fragments */
    struct cl_ranges came;
};

struct cl_fragments {
    struct cl_whole wholes[CL_FRAGMENTS_WHOLES];
    uint64_t turns;
};

/* The end of the fragment that begins at `at`, for datagrams of up to `limit` bytes. The first fragment is short: it
 * fits into the head of a datagram. */
uint32_t cl_fragments_end(uint32_t length, uint32_t limit, uint32_t at);
/* The number of datagrams in which one of `length` bytes leaves. */
uint32_t cl_fragments_count(uint32_t length, uint32_t limit);

/* Takes a fragment of [start, end) in. Returns the whole once it is complete, until the next call; NULL: it is not, or
 * there is no memory. */
const struct cl_whole *cl_fragments_put(struct cl_fragments *fragments, uint64_t number, uint32_t length,
                                        struct cl_range place, const uint8_t *bytes, bool marked);
void cl_fragments_free(struct cl_fragments *fragments);
