#include "group/ring.h"

#include <string.h>

_Static_assert(sizeof(struct cl_ring_entry) == 32, "entries start at multiples of their head");
_Static_assert(sizeof(struct cl_ring_memory) <= CL_RING_HEAD_BYTES, "the head has room");

void cl_ring_open(struct cl_ring *ring, void *memory, uint64_t bytes)
{
    *ring = (struct cl_ring){.memory = memory, .data = (uint8_t *)memory + CL_RING_HEAD_BYTES, .bytes = bytes};
}

/* ---- the writer ---- */

uint64_t cl_ring_room(struct cl_ring *ring)
{
    ring->limit = atomic_load_explicit(&ring->memory->read, memory_order_acquire);
    return ring->bytes - (ring->position - ring->limit);
}

static void put(struct cl_ring *ring, uint64_t position, const void *source, uint64_t length)
{
    uint64_t at = position & (ring->bytes - 1);
    uint64_t first = length < ring->bytes - at ? length : ring->bytes - at;
    memcpy(ring->data + at, source, first);
    if (length > first)
        memcpy(ring->data, (const uint8_t *)source + first, length - first);
}

bool cl_ring_write(struct cl_ring *ring, const struct cl_ring_entry *entry, const void *payload, uint64_t payload_bytes)
{
    uint64_t cost = cl_ring_cost(payload_bytes);
    if (ring->bytes - (ring->position - ring->limit) < cost && cl_ring_room(ring) < cost)
        return false;
    put(ring, ring->position, entry, sizeof *entry);
    if (payload_bytes > 0)
        put(ring, ring->position + sizeof *entry, payload, payload_bytes);
    ring->position += cost;
    atomic_store_explicit(&ring->memory->written, ring->position, memory_order_release);
    return true;
}

bool cl_ring_ask(struct cl_ring *ring, uint64_t bytes)
{
    /* Sequentially consistent, as in cl_ring_answer: either this side sees the room, or the reader sees the question.
     */
    atomic_store(&ring->memory->full, 1);
    ring->limit = atomic_load(&ring->memory->read);
    return ring->bytes - (ring->position - ring->limit) >= bytes;
}

/* ---- the reader ---- */

static void get(const struct cl_ring *ring, uint64_t position, void *target, uint64_t length)
{
    uint64_t at = position & (ring->bytes - 1);
    uint64_t first = length < ring->bytes - at ? length : ring->bytes - at;
    memcpy(target, ring->data + at, first);
    if (length > first)
        memcpy((uint8_t *)target + first, ring->data, length - first);
}

bool cl_ring_next(struct cl_ring *ring, struct cl_ring_entry *entry)
{
    if (ring->limit - ring->position < sizeof *entry) {
        ring->limit = atomic_load_explicit(&ring->memory->written, memory_order_acquire);
        if (ring->limit - ring->position < sizeof *entry)
            return false;
    }
    get(ring, ring->position, entry, sizeof *entry);
    return true;
}

bool cl_ring_copy(struct cl_ring *ring, void *target, uint64_t payload_bytes)
{
    if (payload_bytes > ring->bytes || ring->limit - ring->position < cl_ring_cost(payload_bytes))
        return false;
    if (payload_bytes > 0)
        get(ring, ring->position + sizeof(struct cl_ring_entry), target, payload_bytes);
    return true;
}

void cl_ring_drop(struct cl_ring *ring, uint64_t payload_bytes)
{
    ring->position += cl_ring_cost(payload_bytes);
    atomic_store_explicit(&ring->memory->read, ring->position, memory_order_release);
}

bool cl_ring_is_empty(struct cl_ring *ring)
{
    return atomic_load(&ring->memory->written) == ring->position;
}

bool cl_ring_answer(struct cl_ring *ring)
{
    atomic_thread_fence(memory_order_seq_cst); /* see cl_ring_ask */
    return atomic_load_explicit(&ring->memory->full, memory_order_relaxed) != 0 &&
           atomic_exchange(&ring->memory->full, 0) != 0;
}
