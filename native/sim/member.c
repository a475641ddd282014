#include "sim/member.h"

#include "sim/check.h"
#include "sim/memory.h"

enum { WORK_BUDGET_BYTES = 1 << 20 };

void sim_member_init(struct sim_member *member, struct sim_rank *rank, uint32_t group)
{
    struct sim_world *world = rank->world;
    const struct sim_group *what = &world->scenario->groups[group];
    struct sim_world_group *shared = &world->groups[group];
    *member = (struct sim_member){
        .rank = rank, .group = group, .size = what->size, .peers = what->members, .culprit = UINT16_MAX};
    while (what->members[member->self] != rank->id)
        member->self++;
    member->host = &shared->hosts[shared->place_of[member->self]];
    member->index = shared->index_of[member->self];
    member->lost = sim_new(member->size, sizeof *member->lost);
    member->staging[0] = sim_new(member->size, sizeof *member->staging[0]);
    member->staging[1] = sim_new(member->size, sizeof *member->staging[1]);
    member->counters = sim_new(member->size, sizeof *member->counters);
    member->calls[0] = sim_new(member->size, sizeof *member->calls[0]);
    member->calls[1] = sim_new(member->size, sizeof *member->calls[1]);
    for (uint32_t i = 0; i < member->host->local_count; i++) {
        uint32_t other = member->host->local[i];
        member->counters[other] = &member->host->counters[i];
        member->calls[0][other] = &member->host->calls[2 * i];
        member->calls[1][other] = &member->host->calls[2 * i + 1];
        member->staging[0][other] = sim_host_staging(member->host, i, 0);
        member->staging[1][other] = sim_host_staging(member->host, i, 1);
    }
    member->last = &member->first;
}

void sim_member_free(struct sim_member *member)
{
    if (member->rank == NULL)
        return;
    for (struct sim_operation *operation = member->first; operation != NULL; operation = operation->next)
        cl_executor_destroy(operation->executor);
    free(member->lost);
    free(member->staging[0]);
    free(member->staging[1]);
    free(member->counters);
    free(member->calls[0]);
    free(member->calls[1]);
}

static void wake_host(struct sim_member *member)
{
    struct sim_world *world = member->rank->world;
    for (uint32_t i = 0; i < member->host->local_count; i++)
        sim_rank_wake(&world->ranks[member->peers[member->host->local[i]]]);
}

static void post(void *context, uint32_t value)
{
    struct sim_member *member = context;
    atomic_store(&member->host->counters[member->index], value);
    wake_host(member);
}

static bool reached(const struct sim_member *member, uint32_t index, uint32_t value)
{
    return (int32_t)(atomic_load(&member->host->counters[index]) - value) >= 0;
}

static void tell_peers(struct sim_member *member, int reason)
{
    member->announced = true;
    sim_host_abort(member->host, reason);
    wake_host(member);
    uint16_t *peers = sim_new(member->size, sizeof *peers);
    size_t count = 0;
    for (uint32_t rank = 0; rank < member->size; rank++)
        if (rank != member->self)
            peers[count++] = member->peers[rank];
    if (count > 0)
        cl_endpoint_abort(member->rank->endpoint, member->group + 1, peers, count, reason, UINT16_MAX,
                          sim_rank_now_us(member->rank));
    free(peers);
}

static void finish(struct sim_member *member, struct sim_operation *operation, int status)
{
    struct sim_rank *rank = member->rank;
    if (status == CL_OK) {
        struct cl_missing *missing = cl_executor_missing(operation->executor);
        operation->missing = *missing;
        *missing = (struct cl_missing){0};
    }
    cl_executor_destroy(operation->executor);
    operation->executor = NULL;
    operation->state = SIM_ENDED;
    operation->status = status;
    operation->ended_ns = sim_world_now_ns(rank->world);
    rank->in_flight--;
    sim_trace_say(&rank->world->trace, "rank %u: call %u ended: %s", rank->id, operation->call, cl_error_text(status));
    sim_check_ended(rank->world, operation);
}

static void end_all(struct sim_member *member)
{
    if (!member->announced)
        tell_peers(member, member->status);
    if (member->first == NULL)
        return;
    sim_rank_drop_payloads(member->rank);
    cl_endpoint_cancel(member->rank->endpoint, member->group + 1, UINT32_MAX);
    while (member->first != NULL) {
        struct sim_operation *operation = member->first;
        member->first = operation->next;
        int own = operation->executor != NULL ? cl_executor_status(operation->executor) : CL_OK;
        finish(member, operation, own != CL_OK && own != CL_EABORTED ? own : member->status);
    }
    member->last = &member->first;
}

void sim_member_fail(struct sim_member *member, int reason, uint16_t culprit)
{
    if (member->status != CL_OK)
        return;
    sim_trace_say(&member->rank->world->trace, "rank %u: group %u fails: %s (peer %d)", member->rank->id,
                  member->group + 1, cl_error_text(reason), culprit == UINT16_MAX ? -1 : culprit);
    member->status = reason;
    member->culprit = culprit;
    member->failed_ns = sim_world_now_ns(member->rank->world);
    sim_host_abort(member->host, reason);
    wake_host(member);
}

static void assign_order(struct sim_member *member, struct sim_operation *operation)
{
    const struct sim_call *call = &member->rank->world->scenario->calls[operation->call];
    uint64_t what = (uint64_t)operation->shape << 16 | (uint64_t)call->dtype << 8 | (uint64_t)call->op;
    operation->sequence = member->sequence++;
    member->signature = operation->signature = sim_mix(member->signature ^ what);
    if (!operation->plan->uses_host)
        return;
    operation->host_call = (uint64_t)(member->host_sequence + 1) << 32 | (uint32_t)member->signature;
    operation->host_parity = member->host_sequence++ & 1;
    operation->host_gate = member->host_previous_base;
    operation->host_base = member->host_base;
    member->host_previous_base = member->host_base;
    member->host_base += operation->plan->posts + 1;
}

void sim_member_submit(struct sim_member *member, struct sim_operation *operation)
{
    assign_order(member, operation);
    operation->next = NULL;
    *member->last = operation;
    member->last = &operation->next;
}

static bool gate_is_open(const struct sim_member *member, const struct sim_operation *operation, uint32_t *behind)
{
    for (uint32_t i = 0; i < member->host->local_count; i++) {
        if (!reached(member, i, operation->host_gate)) {
            *behind = member->host->local[i];
            return false;
        }
    }
    return true;
}

static int start(struct sim_member *member, struct sim_operation *operation)
{
    const struct sim_call *call = &member->rank->world->scenario->calls[operation->call];
    if (operation->plan->uses_host)
        atomic_store(member->calls[operation->host_parity][member->self], operation->host_call);
    struct cl_host_view view = {.staging = member->staging[operation->host_parity],
                                .calls = member->calls[operation->host_parity],
                                .call = operation->host_call,
                                .counters = member->counters,
                                .base = operation->host_base,
                                .post = post,
                                .context = member};
    struct cl_executor_config config = {.plan = operation->plan,
                                        .input = operation->input,
                                        .output = operation->output,
                                        .arithmetic = operation->arithmetic,
                                        .host = &view,
                                        .endpoint = member->rank->endpoint,
                                        .peers = member->peers,
                                        .group = member->group + 1,
                                        .sequence = operation->sequence,
                                        .signature = (uint16_t)(1 + operation->signature % 4095),
                                        .priority = call->priority,
                                        .qos = call->qos};
    int status = cl_executor_create(&config, &operation->executor);
    if (status == CL_OK)
        cl_executor_set_owner(operation->executor, operation);
    return status;
}

static int step(struct sim_member *member, struct sim_operation *operation, uint64_t now_us, bool *more)
{
    if (operation->executor == NULL) {
        int status = start(member, operation);
        if (status != CL_OK)
            return status;
    }
    switch (cl_executor_poll(operation->executor, WORK_BUDGET_BYTES, now_us)) {
    case CL_PROGRESS_DONE:
        if (operation->plan->uses_host)
            post(member, operation->host_base + operation->plan->posts + 1);
        return CL_OK;
    case CL_PROGRESS_FAILED:
        return cl_executor_status(operation->executor);
    case CL_PROGRESS_MORE:
        *more = true;
        return CL_EAGAIN;
    default:
        return CL_EAGAIN;
    }
}

/* Whether a rank of this host has called something else, as far as the two are within sight of each other. */
static bool disagrees(const struct sim_member *member, uint32_t rank)
{
    for (uint32_t parity = 0; parity < 2; parity++) {
        uint64_t own = atomic_load(member->calls[parity][member->self]),
                 other = atomic_load(member->calls[parity][rank]);
        if (own != other && own >> 32 == other >> 32)
            return true;
    }
    return false;
}

/* What a blocked host operation must be failed with: it waits for a rank that is dead or does something else. */
static int check_host(struct sim_member *member, struct sim_operation *operation)
{
    uint32_t rank, value;
    if (!operation->plan->uses_host)
        return CL_EAGAIN;
    if (operation->executor == NULL) {
        if (gate_is_open(member, operation, &rank))
            return CL_EAGAIN;
        return disagrees(member, rank) ? CL_EMISMATCH : member->lost[rank] ? CL_EPEERLOST : CL_EAGAIN;
    }
    for (uint32_t i = 0; cl_executor_awaits(operation->executor, i, &rank, &value); i++)
        if (disagrees(member, rank) || member->lost[rank])
            return disagrees(member, rank) ? CL_EMISMATCH : CL_EPEERLOST;
    return CL_EAGAIN;
}

bool sim_member_progress(struct sim_member *member, uint64_t now_us, uint64_t *deadline_us)
{
    bool more = false, host_before = false;
    struct sim_operation **at = &member->first;
    int aborted = member->host->aborted;
    if (aborted != CL_OK)
        sim_member_fail(member, aborted == CL_EPEERLOST || aborted == CL_EMISMATCH ? aborted : CL_EABORTED, UINT16_MAX);
    while (*at != NULL && member->status == CL_OK) {
        struct sim_operation *operation = *at;
        uint32_t behind;
        bool host = operation->plan->uses_host;
        bool may_start = !host || (!host_before && gate_is_open(member, operation, &behind));
        host_before |= host;
        int status = may_start ? step(member, operation, now_us, &more) : CL_EAGAIN;
        if (status == CL_OK) {
            *at = operation->next;
            if (operation->next == NULL)
                member->last = at;
            if (operation->plan->network_steps > 0)
                sim_rank_drop_payloads(member->rank);
            finish(member, operation, CL_OK);
            host_before = false;
            for (struct sim_operation *o = member->first; o != *at; o = o->next)
                host_before |= o->plan->uses_host;
            continue;
        }
        if (status == CL_EAGAIN)
            status = check_host(member, operation);
        if (status == CL_EAGAIN && now_us >= operation->deadline_us)
            status = CL_ETIMEDOUT;
        if (status == CL_EABORTED) /* heard while it started: the reason follows */
            break;
        if (status != CL_EAGAIN) {
            sim_member_fail(member, status, UINT16_MAX);
            break;
        }
        if (operation->deadline_us < *deadline_us)
            *deadline_us = operation->deadline_us;
        at = &operation->next;
    }
    if (member->status != CL_OK)
        end_all(member);
    return more && member->status == CL_OK;
}
