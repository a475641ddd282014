#include "group/host_queue.h"

#include <stdlib.h>
#include <string.h>

int cl_host_queue_init(struct cl_host_queue *queue, uint32_t size, uint32_t rank, const uint32_t *local,
                       uint32_t local_count, const struct cl_group_io *io)
{
    *queue = (struct cl_host_queue){.io = io, .rank = rank, .local_count = local_count, .self = UINT32_MAX};
    if (local == NULL || local_count == 0 || local_count > size)
        return CL_EINVAL;
    for (uint32_t i = 0; i < local_count; i++) {
        if (local[i] >= size || (i > 0 && local[i] <= local[i - 1]))
            return CL_EINVAL;
        if (local[i] == rank)
            queue->self = i;
    }
    if (queue->self == UINT32_MAX)
        return CL_EINVAL;
    queue->local = calloc(local_count, sizeof *queue->local);
    queue->lost = calloc(local_count, sizeof *queue->lost);
    queue->counters = calloc(size, sizeof *queue->counters);
    bool complete = queue->local != NULL && queue->lost != NULL && queue->counters != NULL;
    for (uint32_t parity = 0; parity < 2; parity++) {
        queue->staging[parity] = calloc(size, sizeof *queue->staging[parity]);
        queue->signatures[parity] = calloc(size, sizeof *queue->signatures[parity]);
        complete = complete && queue->staging[parity] != NULL && queue->signatures[parity] != NULL;
    }
    if (!complete)
        return CL_ENOMEM;
    memcpy(queue->local, local, local_count * sizeof *local);
    return CL_OK;
}

void cl_host_queue_free(struct cl_host_queue *queue)
{
    free(queue->local);
    free(queue->lost);
    free(queue->counters);
    for (uint32_t parity = 0; parity < 2; parity++) {
        free(queue->staging[parity]);
        free(queue->signatures[parity]);
    }
}

void cl_host_queue_map(struct cl_host_queue *queue, uint32_t index, _Atomic uint32_t *counter,
                       uint8_t *const staging[2], _Atomic uint64_t *const signatures[2])
{
    uint32_t rank = queue->local[index];
    queue->counters[rank] = counter;
    for (uint32_t parity = 0; parity < 2; parity++) {
        queue->staging[parity][rank] = staging[parity];
        queue->signatures[parity][rank] = signatures[parity];
    }
}

uint32_t cl_host_queue_index(const struct cl_host_queue *queue, uint32_t rank)
{
    uint32_t index = 0;
    while (queue->local[index] != rank)
        index++;
    return index;
}

void cl_host_queue_order(struct cl_host_queue *queue, struct cl_host_turn *turn, uint32_t posts, uint64_t signature)
{
    turn->signature = (uint64_t)(queue->sequence + 1) << 32 | (uint32_t)signature;
    turn->parity = queue->sequence++ & 1;
    turn->gate = queue->previous_base;
    turn->base = queue->base;
    turn->posts = posts;
    queue->previous_base = queue->base;
    queue->base += posts + 1;
}

bool cl_host_queue_enter(struct cl_host_queue *queue)
{
    if (atomic_load(&queue->taken) || atomic_load(&queue->queued) > 0)
        return false;
    atomic_store(&queue->taken, true);
    return true;
}

bool cl_host_queue_leave(struct cl_host_queue *queue)
{
    atomic_store(&queue->taken, false);
    return atomic_load(&queue->queued) > 0;
}

bool cl_host_queue_gate_is_open(const struct cl_host_queue *queue, const struct cl_host_turn *turn, uint32_t *behind)
{
    for (uint32_t i = 0; i < queue->local_count; i++) {
        if (!cl_host_queue_reached(queue, i, turn->gate)) {
            *behind = i;
            return false;
        }
    }
    return true;
}

struct cl_host_view cl_host_queue_begin(struct cl_host_queue *queue, const struct cl_host_turn *turn)
{
    /* The turn's first post publishes it. */
    atomic_store_explicit(queue->signatures[turn->parity][queue->rank], turn->signature, memory_order_relaxed);
    return (struct cl_host_view){.staging = queue->staging[turn->parity],
                                 .signatures = queue->signatures[turn->parity],
                                 .signature = turn->signature,
                                 .counters = queue->counters,
                                 .base = turn->base,
                                 .post = queue->io->post,
                                 .context = queue->io->context};
}

void cl_host_queue_end(struct cl_host_queue *queue, const struct cl_host_turn *turn)
{
    queue->io->post(queue->io->context, turn->base + turn->posts + 1);
}

/* Whether a local rank runs another operation in the same turn, as far as the two are within sight of each other. */
static bool disagrees(const struct cl_host_queue *queue, uint32_t rank)
{
    for (uint32_t parity = 0; parity < 2; parity++) {
        uint64_t own = atomic_load_explicit(queue->signatures[parity][queue->rank], memory_order_relaxed);
        uint64_t other = atomic_load_explicit(queue->signatures[parity][rank], memory_order_relaxed);
        if (own != other && own >> 32 == other >> 32)
            return true;
    }
    return false;
}

int cl_host_queue_doubt(struct cl_host_queue *queue, uint32_t index, uint32_t value, uint64_t now_us)
{
    if (disagrees(queue, queue->local[index]))
        return CL_EMISMATCH;
    /* The counter comes second: a rank may have made its last post just before it went. */
    bool gone = atomic_load(&queue->lost[index]) || queue->io->is_gone(queue->io->context, index, now_us);
    return gone && !cl_host_queue_reached(queue, index, value) ? CL_EPEERLOST : CL_OK;
}
