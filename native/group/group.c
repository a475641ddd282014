/*
 * Groups: the order of operations on one communicator, how it fails, and what the engine thread does for it.
 *
 * Operations that need packets are run by the engine thread, any number at a time; those that touch the host's shared
 * memory one after another, in the order of submission, in the group's lane (lane.c).
 *
 * Calls. All ranks must call the same operations in the same order. Each operation has a number that says what was
 * called so far, and which others can compare: in packets (protocol/signatures.h) and, in the host's memory, beside the
 * counter.
 */
#include "engine/engine.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

static bool copy_names(struct cl_group *group, const struct cl_group_options *options)
{
    group->peers = calloc(options->size, sizeof *group->peers);
    group->local = calloc(options->local_count, sizeof *group->local);
    group->staging[0] = calloc(options->size, sizeof *group->staging[0]);
    group->staging[1] = calloc(options->size, sizeof *group->staging[1]);
    group->calls[0] = calloc(options->size, sizeof *group->calls[0]);
    group->calls[1] = calloc(options->size, sizeof *group->calls[1]);
    group->counters = calloc(options->size, sizeof *group->counters);
    group->lost = calloc(options->size, sizeof *group->lost);
    group->neighbours = calloc(options->local_count, sizeof *group->neighbours);
    if (group->peers == NULL || group->local == NULL || group->staging[0] == NULL || group->staging[1] == NULL ||
        group->calls[0] == NULL || group->calls[1] == NULL || group->counters == NULL || group->lost == NULL ||
        group->neighbours == NULL)
        return false;
    memcpy(group->peers, options->peers, options->size * sizeof *group->peers);
    memcpy(group->local, options->local, options->local_count * sizeof *group->local);
    return true;
}

static void free_group(struct cl_group *group)
{
    cl_host_unmap(group->host);
    free(group->peers);
    free(group->local);
    free(group->staging[0]);
    free(group->staging[1]);
    free(group->calls[0]);
    free(group->calls[1]);
    free(group->counters);
    free(group->lost);
    free(group->neighbours);
    pthread_mutex_destroy(&group->lane);
    free(group);
}

uint32_t cl_group_rank_of(const struct cl_group *group, uint16_t peer)
{
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->peers[rank] == peer)
            return rank;
    return UINT32_MAX;
}

int cl_group_open(cl_engine *engine, const struct cl_group_options *options, cl_group **out)
{
    if (engine == NULL || options == NULL || out == NULL || options->rank >= options->size || options->peers == NULL ||
        options->local == NULL || options->local_count == 0 || options->local_count > options->size ||
        (options->id & CL_GROUP_P2P) != 0)
        return CL_EINVAL;
    bool found = false;
    for (uint32_t i = 0; i < options->local_count; i++) {
        if (options->local[i] >= options->size || (i > 0 && options->local[i] <= options->local[i - 1]))
            return CL_EINVAL;
        found |= options->local[i] == options->rank;
    }
    if (!found || (options->local_count > 1 && options->bells == NULL))
        return CL_EINVAL;
    struct cl_group *group = calloc(1, sizeof *group);
    if (group == NULL)
        return CL_ENOMEM;
    pthread_mutex_init(&group->lane, NULL);
    group->engine = engine;
    group->id = options->id;
    group->rank = options->rank;
    group->size = options->size;
    group->local_count = options->local_count;
    group->spin_us = options->spin_us;
    group->last = &group->first;
    atomic_init(&group->culprit, UINT32_MAX);
    int status = copy_names(group, options) ? CL_OK : CL_ENOMEM;
    if (status == CL_OK)
        status = cl_host_queue_open(group, options);
    if (status != CL_OK) {
        free_group(group);
        return status;
    }
    pthread_mutex_lock(&engine->core);
    cl_mailbox_init(&group->mailbox, engine->endpoint, group->id, group->size, group->peers);
    group->next = engine->groups;
    engine->groups = group;
    for (uint32_t i = 0; i < engine->watched_count; i++) {
        for (uint32_t local = 0; local < group->local_count; local++)
            if (group->peers[group->local[local]] == engine->watched[i].peer)
                group->neighbours[local].pid = engine->watched[i].pid;
        if (engine->watched[i].pidfd < 0)
            cl_group_peer_died(group, engine->watched[i].peer);
    }
    pthread_mutex_unlock(&engine->core);
    *out = group;
    return CL_OK;
}

/* Which rank others should look at: the cause where it is known to be another one, else the one that failed first. */
static uint32_t culprit_of_failure(const struct cl_group *group, int reason)
{
    bool shared = reason == CL_EPEERLOST || reason == CL_EMISMATCH || reason == CL_EABORTED;
    return shared ? atomic_load(&group->culprit) : group->rank;
}

static void tell_peers(struct cl_group *group, int reason)
{
    uint32_t culprit = culprit_of_failure(group, reason);
    group->announced = true;
    cl_host_abort(group->host, reason, culprit);
    if (group->engine->endpoint == NULL)
        return;
    uint16_t *peers = calloc(group->size, sizeof *peers);
    size_t count = 0;
    for (uint32_t rank = 0; peers != NULL && rank < group->size; rank++)
        if (rank != group->rank) /* ranks of this host, too: their engines may be waiting for packets only */
            peers[count++] = group->peers[rank];
    if (count > 0)
        cl_endpoint_abort(group->engine->endpoint, group->id, peers, count, reason,
                          culprit == UINT32_MAX ? UINT16_MAX : group->peers[culprit], cl_now_us());
    free(peers);
}

/* Under core: ends every operation of the group, and tells the peers: of a failure always, of the group's closing only
 * if they may still wait for it. */
static void end_all(struct cl_group *group, int status)
{
    if (!group->announced && (status != CL_ECLOSED || group->first != NULL))
        tell_peers(group, status == CL_ECLOSED ? CL_EABORTED : status);
    if (group->first == NULL)
        return;
    cl_mailbox_free(&group->mailbox);
    if (group->engine->endpoint != NULL) {
        cl_engine_drop_payloads(group->engine);
        cl_endpoint_cancel(group->engine->endpoint, group->id, UINT32_MAX);
    }
    while (group->first != NULL) {
        struct cl_operation *operation = group->first;
        group->first = operation->next;
        if (operation->plan->uses_host) {
            pthread_mutex_lock(&group->lane);
            group->host_queued--;
            pthread_mutex_unlock(&group->lane);
        }
        int own = operation->executor != NULL ? cl_executor_status(operation->executor) : CL_OK;
        cl_operation_finish(operation, own != CL_OK && own != CL_EABORTED ? own : status);
    }
    group->last = &group->first;
}

void cl_group_close(cl_group *group)
{
    if (group == NULL)
        return;
    struct cl_engine *engine = group->engine;
    int32_t open = 0;
    atomic_compare_exchange_strong(&group->status, &open, CL_ECLOSED);
    cl_host_wake_all(group->host); /* a calling thread inside the lane must leave it first */
    for (bool taken = true; taken;) {
        pthread_mutex_lock(&group->lane);
        taken = group->lane_taken;
        pthread_mutex_unlock(&group->lane);
        if (taken)
            sched_yield();
    }
    pthread_mutex_lock(&engine->core);
    /* What still sits in the inbox belongs to groups by pointer: take it over before this one goes. */
    pthread_mutex_lock(&engine->inbox);
    struct cl_operation **at = &engine->inbox_first;
    while (*at != NULL) {
        struct cl_operation *operation = *at;
        if (operation->group == group) {
            *at = operation->next;
            operation->next = NULL;
            *group->last = operation;
            group->last = &operation->next;
        } else {
            at = &operation->next;
        }
    }
    engine->inbox_last = at;
    pthread_mutex_unlock(&engine->inbox);
    end_all(group, atomic_load(&group->status));
    cl_host_leave(group->host);
    for (struct cl_group **link = &engine->groups; *link != NULL; link = &(*link)->next) {
        if (*link == group) {
            *link = group->next;
            break;
        }
    }
    cl_mailbox_free(&group->mailbox);
    if (engine->endpoint != NULL) {
        cl_engine_drop_payloads(engine);
        cl_endpoint_cancel(engine->endpoint, group->id, UINT32_MAX);
    }
    pthread_mutex_lock(&group->lane); /* who has just submitted is about to leave it */
    pthread_mutex_unlock(&group->lane);
    pthread_mutex_unlock(&engine->core);
    cl_engine_wake(engine); /* there may be something to tell the peers */
    free_group(group);
}

void cl_group_fail(struct cl_group *group, int reason, uint32_t culprit)
{
    int32_t open = 0;
    uint32_t nobody = UINT32_MAX;
    if (atomic_load(&group->status) == CL_OK) /* before the status: who sees that looks for the culprit */
        atomic_compare_exchange_strong(&group->culprit, &nobody, culprit);
    if (!atomic_compare_exchange_strong(&group->status, &open, reason))
        return;
    cl_host_abort(group->host, reason, culprit_of_failure(group, reason));
    cl_engine_wake(group->engine); /* it tells the peers and ends what is in flight */
}

void cl_group_hear(struct cl_group *group, int reason, uint32_t culprit)
{
    /* A lost peer or a mismatch is everybody's news; a timeout there is only an abort here. */
    bool shared = reason == CL_EPEERLOST || reason == CL_EMISMATCH;
    cl_group_fail(group, shared ? reason : CL_EABORTED, culprit);
}

void cl_group_abort(cl_group *group, int reason)
{
    cl_group_fail(group, reason < 0 ? reason : CL_EABORTED, group->rank);
}

int cl_group_status(cl_group *group, uint32_t *peer)
{
    if (peer != NULL)
        *peer = atomic_load(&group->culprit);
    return atomic_load(&group->status);
}

void cl_group_peer_died(struct cl_group *group, uint16_t peer)
{
    for (uint32_t i = 0; i < group->local_count; i++) {
        if (i == group->self || group->peers[group->local[i]] != peer)
            continue;
        atomic_store(&group->lost[group->local[i]], true);
        cl_host_wake_all(group->host);
    }
}

/* Under lane: gives the operation its place in the group's order. */
static void assign_order(struct cl_group *group, struct cl_operation *operation)
{
    operation->sequence = group->sequence++;
    if (operation->call != 0) {
        group->call = (group->call ^ operation->call) * 0xD6E8FEB86659FD93u;
        group->call ^= group->call >> 32;
        operation->call = group->call;
    }
    if (!operation->plan->uses_host)
        return;
    operation->host_call = (uint64_t)(group->host_sequence + 1) << 32 | (uint32_t)group->call;
    operation->host_parity = group->host_sequence++ & 1;
    operation->host_gate = group->host_previous_base;
    operation->host_base = group->host_base;
    group->host_previous_base = group->host_base;
    group->host_base += operation->plan->posts + 1;
}

/* Under lane. Returns whether the engine must be told. */
static bool hand_over(struct cl_group *group, struct cl_operation *operation)
{
    struct cl_engine *engine = group->engine;
    if (operation->kind == CL_OPERATION_PLAN)
        assign_order(group, operation);
    group->host_queued += operation->plan->uses_host;
    pthread_mutex_lock(&engine->inbox);
    bool was_empty = engine->inbox_first == NULL;
    *engine->inbox_last = operation;
    engine->inbox_last = &operation->next;
    pthread_mutex_unlock(&engine->inbox);
    return was_empty;
}

void cl_group_submit(struct cl_group *group, struct cl_operation *operation, bool now)
{
    struct cl_engine *engine = group->engine;
    pthread_mutex_lock(&group->lane);
    bool news = hand_over(group, operation);
    if (news && !now)
        cl_engine_wake(engine);
    pthread_mutex_unlock(&group->lane);
    if (news && now)
        cl_engine_attend(engine);
}

int cl_submit_bounded(cl_group *group, cl_plan *plan, void *input, void *output, int dtype, int op,
                      const struct cl_qos *qos, uint64_t timeout_us, cl_operation **out)
{
    struct cl_operation *operation;
    if (out == NULL || qos == NULL)
        return CL_EINVAL;
    int status = cl_operation_create(group, plan, input, output, dtype, op, qos->priority, timeout_us, &operation);
    if (status != CL_OK)
        return status;
    if ((status = cl_operation_set_qos(operation, dtype, op, qos)) != CL_OK) {
        cl_operation_release(operation); /* ours, and the engine's: it has not been handed over */
        cl_operation_release(operation);
        return status;
    }
    cl_group_submit(group, operation, false);
    *out = operation;
    return CL_OK;
}

int cl_submit(cl_group *group, cl_plan *plan, void *input, void *output, int dtype, int op, uint32_t priority,
              uint64_t timeout_us, cl_operation **out)
{
    struct cl_operation *operation;
    if (out == NULL)
        return CL_EINVAL;
    int status = cl_operation_create(group, plan, input, output, dtype, op, priority, timeout_us, &operation);
    if (status != CL_OK)
        return status;
    cl_group_submit(group, operation, false);
    *out = operation;
    return CL_OK;
}

int cl_run(cl_group *group, cl_plan *plan, void *input, void *output, int dtype, int op, uint32_t priority,
           uint64_t timeout_us)
{
    struct cl_operation *operation;
    int status = cl_operation_create(group, plan, input, output, dtype, op, priority, timeout_us, &operation);
    if (status != CL_OK)
        return status;
    pthread_mutex_lock(&group->lane);
    bool here = cl_host_queue_enter(group, operation);
    if (here)
        assign_order(group, operation);
    else if (hand_over(group, operation))
        cl_engine_wake(group->engine);
    pthread_mutex_unlock(&group->lane);
    if (here) {
        status = cl_host_queue_run(group, operation);
        cl_operation_finish(operation, status);
        cl_host_queue_leave(group);
    } else {
        status = cl_operation_wait(operation, 0);
    }
    cl_operation_release(operation);
    return status;
}

/* ---- the engine thread's side, under core ---- */

static int step_operation(struct cl_group *group, struct cl_operation *operation, uint64_t now_us, bool *more)
{
    if (operation->executor == NULL) {
        int status = operation->kind == CL_OPERATION_PLAN ? CL_OK : cl_p2p_bind(operation, now_us);
        if (status == CL_OK)
            status = cl_operation_start(operation);
        if (status != CL_OK)
            return status;
        cl_executor_set_owner(operation->executor, operation);
    }
    switch (cl_executor_poll(operation->executor, CL_WORK_BUDGET_BYTES, now_us)) {
    case CL_PROGRESS_DONE:
        if (operation->plan->uses_host)
            cl_host_queue_end(group, operation);
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

/* The rank to name when an operation fails: who disagrees, or who is late; UINT32_MAX: nobody known. */
static uint32_t culprit_of(const struct cl_group *group, const struct cl_operation *operation, int status)
{
    uint32_t rank = UINT32_MAX, value, behind;
    if (operation->kind != CL_OPERATION_PLAN)
        return status == CL_ETIMEDOUT || status == CL_EPEERLOST ? operation->ticket.source : UINT32_MAX;
    if (operation->executor == NULL) {
        bool gated = operation->plan->uses_host && !cl_host_queue_gate_is_open(group, operation, &behind);
        return status == CL_ETIMEDOUT && gated ? group->local[behind] : UINT32_MAX;
    }
    if (status != CL_ETIMEDOUT)
        return cl_executor_culprit(operation->executor);
    if (!cl_executor_awaits(operation->executor, 0, &rank, &value) && operation->plan->network_steps > 0)
        rank = cl_group_rank_of(group, cl_endpoint_late_peer(group->engine->endpoint, group->id, operation->sequence));
    return rank;
}

static void remove_operation(struct cl_group *group, struct cl_operation **at)
{
    struct cl_operation *operation = *at;
    *at = operation->next;
    if (operation->next == NULL)
        group->last = at;
    if (operation->plan->uses_host) {
        pthread_mutex_lock(&group->lane);
        group->host_queued--;
        pthread_mutex_unlock(&group->lane);
    }
}

bool cl_group_progress(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us)
{
    bool more = false, host_before = false;
    struct cl_operation **at = &group->first;
    int aborted = cl_host_aborted(group->host);
    if (aborted != CL_OK)
        cl_group_hear(group, aborted, cl_host_culprit(group->host));
    struct cl_operation *bound;
    while (group->mailbox.queues != NULL && (bound = cl_p2p_next(group)) != NULL) {
        int status = step_operation(group, bound, now_us, &more);
        if (status != CL_EAGAIN)
            cl_group_fail(group, status, culprit_of(group, bound, status));
    }
    while (*at != NULL && atomic_load(&group->status) == CL_OK) {
        struct cl_operation *operation = *at;
        int status = CL_EAGAIN;
        if (cl_host_queue_may_start(group, operation, &host_before))
            status = step_operation(group, operation, now_us, &more);
        if (status == CL_OK) {
            remove_operation(group, at);
            if (operation->plan->network_steps > 0)
                cl_engine_drop_payloads(group->engine); /* repetitions that wait for room still name its memory */
            cl_operation_finish(operation, CL_OK);
            host_before = false;
            for (struct cl_operation *o = group->first; o != *at; o = o->next)
                host_before |= o->plan->uses_host;
            continue;
        }
        if (status == CL_EAGAIN && cl_host_queue_check(group, operation, now_us) != CL_OK)
            break;
        if (status == CL_EAGAIN && now_us >= operation->deadline_us)
            status = CL_ETIMEDOUT;
        if (status == CL_EABORTED) /* heard while it started: the reason follows, see take_completions */
            break;
        if (status != CL_EAGAIN) {
            cl_group_fail(group, status, culprit_of(group, operation, status));
            break;
        }
        if (operation->deadline_us < *deadline_us)
            *deadline_us = operation->deadline_us;
        at = &operation->next;
    }
    int failed = atomic_load(&group->status);
    if (failed != CL_OK) {
        end_all(group, failed);
        return false;
    }
    return more;
}
