#include "sim/host.h"

#include <string.h>

#include "sim/memory.h"

static void furnish(struct sim_host_queue *queue, uint32_t local_count)
{
    queue->counters = sim_new(local_count, sizeof *queue->counters);
    queue->signatures = sim_new(2 * (size_t)local_count, sizeof *queue->signatures);
    queue->bells = sim_new((size_t)local_count * local_count, sizeof *queue->bells);
}

static uint8_t *new_staging(uint32_t local_count, uint64_t staging_bytes)
{
    uint8_t *staging = sim_new(2 * (size_t)local_count, staging_bytes);
    memset(staging, 0xA5, 2 * (size_t)local_count * staging_bytes); /* bytes nobody wrote must not look right */
    return staging;
}

void sim_host_init(struct sim_host *host, uint32_t local_count, uint64_t staging_bytes, uint8_t classes)
{
    *host = (struct sim_host){.local_count = local_count, .staging_bytes = staging_bytes};
    host->local = sim_new(local_count, sizeof *host->local);
    host->members = sim_new(local_count, sizeof *host->members);
    host->left = sim_new(local_count, sizeof *host->left);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        furnish(&host->queues[queue], local_count);
    for (uint32_t class = 0; class < CL_CLASSES; class ++)
        host->staging[class] = classes >> class & 1 ? new_staging(local_count, staging_bytes) : NULL;
    host->requests = sim_new(local_count, sizeof *host->requests);
    host->listens = sim_new(local_count, sizeof *host->listens);
    size_t rings_bytes = (size_t)local_count * local_count * SIM_RING_BYTES;
    host->rings = sim_memory(aligned_alloc(CL_RING_LINE_BYTES, rings_bytes));
    memset(host->rings, 0, rings_bytes);
}

void sim_host_free(struct sim_host *host)
{
    free(host->local);
    free(host->members);
    free(host->left);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++) {
        free(host->queues[queue].counters);
        free(host->queues[queue].signatures);
        free(host->queues[queue].bells);
    }
    for (uint32_t class = 0; class < CL_CLASSES; class ++)
        free(host->staging[class]);
    free(host->requests);
    free(host->listens);
    free(host->rings);
}

/* ---- the groups' io: see group/io.h ---- */

static void wake(struct sim_member *member)
{
    if (member != NULL)
        member->group.io.wake(member);
}

static void wake_host(void *context)
{
    const struct sim_member *member = context;
    for (uint32_t i = 0; i < member->host->local_count; i++) {
        atomic_fetch_add(&member->host->requests[i], 1); /* of those that sleep, too: see group/groups.h */
        wake(member->host->members[i]);
    }
}

static void post(void *context, uint32_t queue, uint32_t value)
{
    const struct sim_member *member = context;
    struct sim_host *host = member->host;
    uint32_t self = member->group.host_queues.self;
    atomic_store(&host->queues[queue].counters[self], value);
    for (uint32_t i = 0; i < host->local_count; i++) {
        bool *bell = &host->queues[queue].bells[self * host->local_count + i];
        if (*bell && host->members[i] != NULL && host->members[i]->ring != NULL)
            host->members[i]->ring(host->members[i]);
        *bell = false;
    }
}

static void request_bell(void *context, uint32_t queue, uint32_t index)
{
    const struct sim_member *member = context;
    const struct sim_host *host = member->host;
    host->queues[queue].bells[index * host->local_count + member->group.host_queues.self] = true;
}

/* A dead rank is reported by cl_group_peer_died; stopping a rank of one's own host is not simulated. */
static bool is_gone(void *context, uint32_t index, uint64_t now_us)
{
    const struct sim_member *member = context;
    (void)now_us;
    return member->host->left[index];
}

static void abort_host(void *context, int reason, uint32_t culprit)
{
    const struct sim_member *member = context;
    if (member->host->aborted == CL_OK) {
        member->host->aborted = reason;
        member->host->culprit = culprit;
    }
    wake_host(context);
}

static int aborted(void *context, uint32_t *culprit)
{
    const struct sim_member *member = context;
    *culprit = member->host->culprit;
    return member->host->aborted;
}

static void notify(void *context, uint32_t index, bool at_once)
{
    const struct sim_member *member = context;
    struct sim_host *host = member->host;
    if (at_once)
        atomic_fetch_add(&host->requests[index], 1);
    if (host->listens[index] >= (at_once ? SIM_LISTENS_TO_REQUESTS : SIM_LISTENS_TO_ALL)) {
        host->listens[index] = SIM_LISTENS_TO_NOTHING;
        wake(host->members[index]);
    }
}

static void listen_for(void *context, bool all)
{
    const struct sim_member *member = context;
    member->host->listens[member->group.host_queues.self] = all ? SIM_LISTENS_TO_ALL : SIM_LISTENS_TO_REQUESTS;
}

static void *ring(const struct sim_host *host, uint32_t from, uint32_t to)
{
    return host->rings + ((size_t)from * host->local_count + to) * SIM_RING_BYTES;
}

void sim_member_open(struct sim_member *member, struct sim_rank *rank, struct sim_host *host,
                     const struct cl_group_options *options, struct cl_endpoint *endpoint, struct cl_group_io io)
{
    member->rank = rank;
    member->host = host;
    member->ring = NULL;
    io.context = member;
    io.wake_host = wake_host;
    io.post = post;
    io.request_bell = request_bell;
    io.is_gone = is_gone;
    io.abort = abort_host;
    io.aborted = aborted;
    io.notify = notify;
    io.listen = listen_for;
    if (cl_group_init(&member->group, options, endpoint, &io) != CL_OK)
        sim_memory(NULL);
    host->members[member->group.host_queues.self] = member;
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++) {
        const struct sim_host_queue *of_queue = &host->queues[queue];
        uint8_t *staging = host->staging[cl_host_queue_class(queue)];
        for (uint32_t i = 0; i < host->local_count; i++) {
            struct cl_host_place place = {.counter = &of_queue->counters[i]};
            for (uint32_t parity = 0; parity < 2; parity++) {
                if (staging != NULL)
                    place.staging[parity] = staging + (2 * i + cl_host_queue_half(queue, parity)) * host->staging_bytes;
                place.signatures[parity] = &of_queue->signatures[2 * i + parity];
            }
            cl_host_queues_map(&member->group.host_queues, queue, i, &place);
        }
    }
    uint32_t self = member->group.host_queues.self;
    for (uint32_t i = 0; i < host->local_count; i++)
        if (i != self)
            cl_channels_map(&member->group.channels, i, ring(host, self, i), ring(host, i, self),
                            SIM_RING_BYTES - CL_RING_HEAD_BYTES);
    host->listens[self] = SIM_LISTENS_TO_REQUESTS;
    if (host->local_count > 1)
        cl_channels_listen(&member->group.channels, &host->requests[self]);
}

void sim_member_leave(struct sim_member *member)
{
    uint32_t self = member->group.host_queues.self;
    member->host->left[self] = true;
    wake_host(member); /* those that wait for it */
    member->host->members[self] = NULL;
}
