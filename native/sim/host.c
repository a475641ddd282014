#include "sim/host.h"

#include <string.h>

#include "sim/memory.h"

void sim_host_init(struct sim_host *host, uint32_t local_count, uint64_t staging_bytes)
{
    *host = (struct sim_host){.local_count = local_count, .staging_bytes = staging_bytes};
    host->local = sim_new(local_count, sizeof *host->local);
    host->members = sim_new(local_count, sizeof *host->members);
    host->counters = sim_new(local_count, sizeof *host->counters);
    host->signatures = sim_new(2 * (size_t)local_count, sizeof *host->signatures);
    host->bells = sim_new((size_t)local_count * local_count, sizeof *host->bells);
    host->staging = sim_new(2 * (size_t)local_count, staging_bytes);
    memset(host->staging, 0xA5, 2 * (size_t)local_count * staging_bytes); /* bytes nobody wrote must not look right */
}

void sim_host_free(struct sim_host *host)
{
    free(host->local);
    free(host->members);
    free(host->counters);
    free(host->signatures);
    free(host->bells);
    free(host->staging);
}

/* ---- what a group asks for ---- */

static void wake(struct sim_member *member)
{
    if (member != NULL)
        member->group.io.wake(member);
}

static void wake_host(void *context)
{
    const struct sim_member *member = context;
    for (uint32_t i = 0; i < member->host->local_count; i++)
        wake(member->host->members[i]);
}

static void post(void *context, uint32_t value)
{
    const struct sim_member *member = context;
    struct sim_host *host = member->host;
    uint32_t self = member->group.host_queue.self;
    atomic_store(&host->counters[self], value);
    for (uint32_t i = 0; i < host->local_count; i++) {
        bool *bell = &host->bells[self * host->local_count + i];
        if (*bell)
            wake(host->members[i]);
        *bell = false;
    }
}

static void request_bell(void *context, uint32_t index)
{
    const struct sim_member *member = context;
    member->host->bells[index * member->host->local_count + member->group.host_queue.self] = true;
}

/* A dead rank is reported by cl_group_peer_died; stopping a rank of one's own host is not simulated. */
static bool is_gone(void *context, uint32_t index, uint64_t now_us)
{
    (void)context, (void)index, (void)now_us;
    return false;
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

void sim_member_open(struct sim_member *member, struct sim_rank *rank, struct sim_host *host,
                     const struct cl_group_options *options, struct cl_endpoint *endpoint, struct cl_group_io io)
{
    member->rank = rank;
    member->host = host;
    io.context = member;
    io.wake_host = wake_host;
    io.post = post;
    io.request_bell = request_bell;
    io.is_gone = is_gone;
    io.abort = abort_host;
    io.aborted = aborted;
    if (cl_group_init(&member->group, options, endpoint, &io) != CL_OK)
        sim_memory(NULL);
    host->members[member->group.host_queue.self] = member;
    for (uint32_t i = 0; i < host->local_count; i++) {
        uint8_t *half = host->staging + 2 * i * host->staging_bytes;
        uint8_t *staging[] = {half, half + host->staging_bytes};
        _Atomic uint64_t *signatures[] = {&host->signatures[2 * i], &host->signatures[2 * i + 1]};
        cl_host_queue_map(&member->group.host_queue, i, &host->counters[i], staging, signatures);
    }
}
