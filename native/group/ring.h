/*
 * Ring: a bounded queue of entries in shared memory, from one rank of a host to another. One process writes it, another
 * one reads it.
 *
 * An entry is a head and perhaps payload. It becomes visible when all of it is written, so the reader never sees a part
 * of an entry, even if the writer dies. Positions count bytes since the beginning and never wrap.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    CL_RING_HEAD_BYTES = 4096,     /* before the data: a page, so that data begins on one */
    CL_RING_DATA_BYTES_MIN = 2048, /* the data's length is a power of two */
    CL_RING_LINE_BYTES = 128,      /* two cache lines: processors fetch them in pairs */
};

/* The kinds of entries: see channel.h. */
enum cl_ring_kind { CL_RING_EAGER = 1, CL_RING_OFFER, CL_RING_STREAM, CL_RING_DATA, CL_RING_TAKEN };

/* The head of an entry. */
struct cl_ring_entry {
    uint16_t kind;
    uint16_t class; /* a message's class, 0 to 7 */
    uint32_t tag;
    uint64_t length;  /* a message's length; of DATA, that of its own payload */
    uint64_t number;  /* names an offered message among those of this ring */
    uint64_t address; /* where an offered message is in the sender's memory */
};

/* The beginning of a ring's memory: each line is written by one side. */
struct cl_ring_memory {
    _Alignas(CL_RING_LINE_BYTES) _Atomic uint64_t written; /* what the writer has written */
    _Alignas(CL_RING_LINE_BYTES) _Atomic uint64_t read;    /* what the reader has read */
    _Atomic uint64_t granted; /* the sum of eager messages, with their heads, that the reader takes in */
    _Alignas(CL_RING_LINE_BYTES) _Atomic uint32_t full; /* the writer waits for room; the reader clears it */
};

/* One side of a ring. */
struct cl_ring {
    struct cl_ring_memory *memory;
    uint8_t *data;
    uint64_t bytes;    /* the data's length */
    uint64_t position; /* where this side's next entry is */
    uint64_t limit;    /* the other side's position when this one last looked */
};

/* Attaches to `memory`: CL_RING_HEAD_BYTES and `bytes` of data, a power of two; zeroed once, before both sides begin.
 */
void cl_ring_open(struct cl_ring *ring, void *memory, uint64_t bytes);

/* Bytes that an entry with this payload takes. */
static inline uint64_t cl_ring_cost(uint64_t payload_bytes)
{
    return sizeof(struct cl_ring_entry) + ((payload_bytes + 31) & ~(uint64_t)31);
}

/* ---- the writer ---- */

/* Bytes that are free now. */
uint64_t cl_ring_room(struct cl_ring *ring);
/* Writes an entry. False when there is no room: the reader then reports room (cl_ring_ask, cl_ring_answer). */
bool cl_ring_write(struct cl_ring *ring, const struct cl_ring_entry *entry, const void *payload,
                   uint64_t payload_bytes);
/* Asks the reader to tell when there is room. Returns whether `bytes` are free already. */
bool cl_ring_ask(struct cl_ring *ring, uint64_t bytes);

/* ---- the reader ---- */

/* Copies the head of the next entry; false: there is none. */
bool cl_ring_next(struct cl_ring *ring, struct cl_ring_entry *entry);
/* Copies the payload of the next entry. False, and nothing is copied: the entry is shorter. */
bool cl_ring_copy(struct cl_ring *ring, void *target, uint64_t payload_bytes);
/* Frees the next entry, with its payload. */
void cl_ring_drop(struct cl_ring *ring, uint64_t payload_bytes);
/* Whether there is an entry. A reader that is about to sleep asks. */
bool cl_ring_is_empty(struct cl_ring *ring);
/* Whether the writer waits for room, and must be told that there is some; true once per question. */
bool cl_ring_answer(struct cl_ring *ring);
