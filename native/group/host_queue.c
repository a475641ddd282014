#include "group/host_queue.h"

#include <stdlib.h>
#include <string.h>

enum { HASH_BITS = 24 /* bits of a published signature; the number of the operation is above */ };

static bool allocate(struct cl_host_queues *queues, uint32_t size)
{
    queues->local = calloc(queues->local_count, sizeof *queues->local);
    queues->index = calloc(size, sizeof *queues->index);
    queues->lost = calloc(queues->local_count, sizeof *queues->lost);
    bool complete = queues->local != NULL && queues->index != NULL && queues->lost != NULL;
    for (uint32_t i = 0; i < CL_GROUP_QUEUES; i++) {
        struct cl_host_queue *queue = &queues->queues[i];
        queue->places = calloc(queues->local_count, sizeof *queue->places);
        complete = complete && queue->places != NULL;
    }
    return complete;
}

int cl_host_queues_init(struct cl_host_queues *queues, uint32_t size, uint32_t rank, const uint32_t *local,
                        uint32_t local_count, const struct cl_group_io *io)
{
    *queues =
        (struct cl_host_queues){.io = io, .local_count = local_count, .pairs = local_count < size, .self = UINT32_MAX};
    if (local == NULL || local_count == 0 || local_count > size)
        return CL_EINVAL;
    for (uint32_t i = 0; i < local_count; i++) {
        if (local[i] >= size || (i > 0 && local[i] <= local[i - 1]))
            return CL_EINVAL;
        if (local[i] == rank)
            queues->self = i;
    }
    if (queues->self == UINT32_MAX)
        return CL_EINVAL;
    if (!allocate(queues, size))
        return CL_ENOMEM;
    memcpy(queues->local, local, local_count * sizeof *local);
    memset(queues->index, 0xff, size * sizeof *queues->index);
    for (uint32_t i = 0; i < local_count; i++)
        queues->index[local[i]] = i;
    return CL_OK;
}

void cl_host_queues_free(struct cl_host_queues *queues)
{
    free(queues->local);
    free(queues->index);
    free(queues->lost);
    for (uint32_t i = 0; i < CL_GROUP_QUEUES; i++)
        free(queues->queues[i].places);
}

void cl_host_queues_map(struct cl_host_queues *queues, uint32_t queue, uint32_t index,
                        const struct cl_host_place *place)
{
    queues->queues[queue].places[index] = *place;
}

uint32_t cl_host_queues_next(const struct cl_host_queues *queues, uint32_t class)
{
    const struct cl_host_queue *both = &queues->queues[2 * class];
    return 2 * class + (queues->pairs ? (both[0].operations + both[1].operations) & 1 : 0);
}

void cl_host_queues_order(struct cl_host_queues *queues, struct cl_host_turn *turn, uint32_t class, uint32_t posts,
                          uint64_t signature)
{
    turn->queue = cl_host_queues_next(queues, class);
    struct cl_host_queue *queue = &queues->queues[turn->queue];
    turn->signature = ++queues->sequence << HASH_BITS | (signature & ((1u << HASH_BITS) - 1));
    turn->parity = queues->pairs ? 0 : queue->operations & 1;
    turn->gate = queues->pairs ? queue->base : queue->previous_base;
    turn->base = queue->base;
    turn->posts = posts;
    queue->operations++;
    queue->previous_base = queue->base;
    queue->base += posts + 1;
}

struct cl_host_queue *cl_host_queues_enter(struct cl_host_queues *queues, uint32_t class)
{
    uint32_t next = cl_host_queues_next(queues, class);
    struct cl_host_queue *queue = &queues->queues[next];
    if (atomic_load(&queue->taken) || atomic_load(&queue->queued) > 0 ||
        atomic_load(&queues->queues[next ^ 1].queued) > 0)
        return NULL;
    atomic_store(&queue->taken, true);
    return queue;
}

bool cl_host_queue_leave(struct cl_host_queue *queue)
{
    atomic_store(&queue->taken, false);
    return atomic_load(&queue->queued) > 0;
}

bool cl_host_queues_gate_is_open(const struct cl_host_queues *queues, const struct cl_host_turn *turn, uint32_t *behind)
{
    for (uint32_t i = 0; i < queues->local_count; i++) {
        if (!cl_host_queue_reached(&queues->queues[turn->queue], i, turn->gate)) {
            *behind = i;
            return false;
        }
    }
    return true;
}

struct cl_host_view cl_host_queues_begin(struct cl_host_queues *queues, const struct cl_host_turn *turn)
{
    const struct cl_host_place *places = queues->queues[turn->queue].places;
    /* The turn's first post publishes it. */
    atomic_store_explicit(places[queues->self].signatures[turn->parity], turn->signature, memory_order_relaxed);
    return (struct cl_host_view){.places = places,
                                 .index = queues->index,
                                 .parity = turn->parity,
                                 .signature = turn->signature,
                                 .base = turn->base,
                                 .queue = turn->queue,
                                 .post = queues->io->post,
                                 .context = queues->io->context};
}

void cl_host_queues_end(struct cl_host_queues *queues, const struct cl_host_turn *turn)
{
    queues->io->post(queues->io->context, turn->queue, turn->base + turn->posts + 1);
}

static uint64_t published(const struct cl_host_queues *queues, uint32_t queue, uint32_t index, uint32_t parity)
{
    return atomic_load_explicit(queues->queues[queue].places[index].signatures[parity], memory_order_relaxed);
}

/* The queue in which a local rank runs the operation of this number, and its signature there; false: the rank is too
 * far before or behind it. */
static bool find(const struct cl_host_queues *queues, uint32_t index, uint64_t number, uint32_t *queue,
                 uint64_t *signature)
{
    for (*queue = 0; *queue < CL_GROUP_QUEUES; (*queue)++) {
        for (uint32_t parity = 0; parity < 2; parity++) {
            *signature = published(queues, *queue, index, parity);
            if (*signature >> HASH_BITS == number)
                return true;
        }
    }
    return false;
}

/* Whether a local rank runs the operation with this signature otherwise, or in another queue. */
static bool differs(const struct cl_host_queues *queues, uint32_t queue, uint32_t index, uint64_t signature)
{
    uint32_t theirs;
    uint64_t other;
    return find(queues, index, signature >> HASH_BITS, &theirs, &other) && (other != signature || theirs != queue);
}

int cl_host_queues_doubt(struct cl_host_queues *queues, uint32_t queue, uint32_t index, uint32_t value, uint64_t now_us)
{
    for (uint32_t parity = 0; parity < 2; parity++) {
        uint64_t own = published(queues, queue, queues->self, parity);
        if (own != 0 && own != published(queues, queue, index, parity) && differs(queues, queue, index, own))
            return CL_EMISMATCH;
    }
    /* The counter comes second: a rank may have made its last post just before it went. */
    bool gone = atomic_load(&queues->lost[index]) || queues->io->is_gone(queues->io->context, index, now_us);
    return gone && !cl_host_queue_reached(&queues->queues[queue], index, value) ? CL_EPEERLOST : CL_OK;
}

bool cl_host_queues_classes(const struct cl_host_queues *queues, uint32_t index, uint32_t *own, uint32_t *theirs)
{
    uint32_t queue;
    uint64_t other;
    for (uint32_t i = 0; i < CL_GROUP_QUEUES; i++) {
        *own = cl_host_queue_class(i);
        for (uint32_t parity = 0; parity < 2; parity++) {
            uint64_t signature = published(queues, i, queues->self, parity);
            if (signature == 0 || !find(queues, index, signature >> HASH_BITS, &queue, &other))
                continue;
            *theirs = cl_host_queue_class(queue);
            if (*theirs != *own)
                return true;
        }
    }
    return false;
}
