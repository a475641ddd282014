/*
 * The lane: a group's operations in the host's shared memory run one after another, in the order of submission: by the
 * engine thread, or, when the caller waits anyway and nobody is before it, by the calling thread, which saves two
 * thread switches.
 *
 * Host counters. Each operation owns the counter values base+1 .. base+posts of its plan, and base+posts+1, which every
 * rank posts when it has ended the operation: its own reads of others' staging are over then. Consecutive operations
 * use alternate halves of the staging, so before one starts, every local rank must have ended the operation two before
 * it (host_gate); that has nearly always happened long ago.
 */
#include "engine/engine.h"

#include "os/process.h"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#else
#define relax() sched_yield()
#endif

static uint32_t local_index(const struct cl_group *group, uint32_t rank)
{
    uint32_t index = 0;
    while (group->local[index] != rank)
        index++;
    return index;
}

int cl_host_queue_open(struct cl_group *group, const struct cl_group_options *options)
{
    group->self = local_index(group, options->rank);
    bool alone = options->local_count == 1; /* what its plans post, nobody hears; but they need not know that */
    int32_t fd = options->host_fd;
    int status = alone ? cl_host_create(1, options->staging_bytes, &fd) : CL_OK;
    if (status == CL_OK)
        status = cl_host_map(fd, options->local_count, group->self, options->staging_bytes,
                             alone ? group->engine->bell : options->bells, group->engine->bell_fd, &group->host);
    if (alone)
        cl_host_close_fd(fd);
    if (status != CL_OK)
        return status;
    for (uint32_t i = 0; i < group->local_count; i++) {
        uint32_t rank = group->local[i];
        group->counters[rank] = cl_host_counter(group->host, i);
        for (uint32_t parity = 0; parity < 2; parity++) {
            group->staging[parity][rank] = cl_host_staging(group->host, i, parity);
            group->calls[parity][rank] = cl_host_call(group->host, i, parity);
        }
    }
    return CL_OK;
}

bool cl_host_queue_gate_is_open(const struct cl_group *group, const struct cl_operation *operation, uint32_t *behind)
{
    for (uint32_t i = 0; i < group->local_count; i++) {
        if (!cl_host_reached(group->host, i, operation->host_gate)) {
            *behind = i;
            return false;
        }
    }
    return true;
}

void cl_host_queue_end(struct cl_group *group, const struct cl_operation *operation)
{
    cl_host_post(group->host, operation->host_base + operation->plan->posts + 1);
}

/* Whether a rank of this host has called something else, as far as the two are within sight of each other. */
static bool disagrees(const struct cl_group *group, uint32_t rank)
{
    for (uint32_t parity = 0; parity < 2; parity++) {
        uint64_t own = atomic_load_explicit(group->calls[parity][group->rank], memory_order_relaxed);
        uint64_t other = atomic_load_explicit(group->calls[parity][rank], memory_order_relaxed);
        if (own != other && own >> 32 == other >> 32)
            return true;
    }
    return false;
}

/* Whether a rank of this host has been stopped for as long as a rank of another host may be silent. Who waits looks at
 * its process now and then; a stop that nobody saw the end of does not count. */
static bool is_frozen(struct cl_group *group, uint32_t index, uint64_t now_us)
{
    struct cl_neighbour *neighbour = &group->neighbours[index];
    uint64_t timeout_us = group->engine->options.peer_timeout_us;
    uint64_t unseen_us = now_us - atomic_load(&neighbour->looked_us);
    if (neighbour->pid == 0 || timeout_us == 0 || unseen_us < CL_SLEEP_MAX_US)
        return false;
    atomic_store(&neighbour->looked_us, now_us);
    uint64_t since_us = atomic_load(&neighbour->stopped_us);
    if (!cl_process_is_stopped(neighbour->pid))
        since_us = 0;
    else if (since_us == 0 || unseen_us > 10 * CL_SLEEP_MAX_US)
        since_us = now_us;
    atomic_store(&neighbour->stopped_us, since_us);
    return since_us != 0 && now_us - since_us >= timeout_us;
}

/* Whether a rank of this host posts no more. Its last post may have come just before: look here first, and then at the
 * counter. */
static bool is_gone(struct cl_group *group, uint32_t index, uint64_t now_us)
{
    return atomic_load(&group->lost[group->local[index]]) || cl_host_left(group->host, index) ||
           is_frozen(group, index, now_us);
}

/* What a waiting host operation must be failed with, or CL_OK. `rank` is the one it waits for, UINT32_MAX: none; `gone`
 * says that it waits in vain. */
static int reason_to_stop(struct cl_group *group, uint32_t rank, bool gone, uint64_t now_us, uint64_t deadline_us)
{
    int status = atomic_load(&group->status);
    if (status != CL_OK)
        return status;
    int aborted = cl_host_aborted(group->host);
    if (aborted != CL_OK) {
        cl_group_hear(group, aborted, cl_host_culprit(group->host));
        return atomic_load(&group->status);
    }
    if (rank != UINT32_MAX && disagrees(group, rank)) {
        cl_group_fail(group, CL_EMISMATCH, rank);
        return CL_EMISMATCH;
    }
    if (gone) {
        cl_group_fail(group, CL_EPEERLOST, rank);
        return CL_EPEERLOST;
    }
    if (now_us >= deadline_us) {
        cl_group_fail(group, CL_ETIMEDOUT, rank);
        return CL_ETIMEDOUT;
    }
    return CL_OK;
}

/* The calling thread waits for a counter: a spin as long as recent waits suggest, then sleep. */
static int wait_for(struct cl_group *group, uint32_t index, uint32_t value, uint64_t deadline_us)
{
    uint64_t start = cl_now_us(), now = start;
    uint64_t limit = group->spin_us;
    if (limit > 0 && group->spin_ewma_us <= limit) {
        while (now - start < limit) {
            for (int i = 0; i < 64; i++) {
                if (cl_host_reached(group->host, index, value))
                    goto reached;
                relax();
            }
            now = cl_now_us();
        }
    }
    for (;;) {
        bool gone = is_gone(group, index, now);
        if (cl_host_reached(group->host, index, value))
            break;
        int stop = reason_to_stop(group, group->local[index], gone, now, deadline_us);
        if (stop != CL_OK)
            return stop;
        uint64_t left = deadline_us - now < CL_SLEEP_MAX_US ? deadline_us - now : CL_SLEEP_MAX_US;
        cl_host_sleep(group->host, index, value, left);
        now = cl_now_us();
    }
reached:
    now = cl_now_us();
    /* Capped, so that one late rank does not turn spinning off for long. */
    uint64_t took = now - start > 4 * limit ? 4 * limit : now - start;
    group->spin_ewma_us = (7 * group->spin_ewma_us + took) / 8;
    return CL_OK;
}

/* The calling thread runs the operation, which must have entered the lane. */
int cl_host_queue_run(struct cl_group *group, struct cl_operation *operation)
{
    uint32_t behind = 0;
    bool host = operation->plan->uses_host;
    int status = reason_to_stop(group, UINT32_MAX, false, 0, UINT64_MAX);
    while (status == CL_OK && host && !cl_host_queue_gate_is_open(group, operation, &behind))
        status = wait_for(group, behind, operation->host_gate, operation->deadline_us);
    if (status == CL_OK)
        status = cl_operation_start(operation);
    while (status == CL_OK) {
        enum cl_progress progress = cl_executor_poll(operation->executor, SIZE_MAX, 0);
        uint32_t rank, value;
        if (progress == CL_PROGRESS_DONE)
            break;
        if (progress == CL_PROGRESS_FAILED) {
            status = cl_executor_status(operation->executor);
            cl_group_fail(group, status, cl_executor_culprit(operation->executor));
        } else if (!cl_executor_awaits(operation->executor, 0, &rank, &value)) {
            status = CL_EINVAL; /* a plan that waits for nothing: cannot be, cl_plan_create saw to it */
        } else {
            status = wait_for(group, local_index(group, rank), value, operation->deadline_us);
        }
    }
    if (host && status == CL_OK)
        cl_host_queue_end(group,
                          operation); /* after a failure it would tell the others that all of the data is there */
    else if (host && status == CL_ECLOSED)
        cl_host_abort(group->host, CL_EABORTED, group->rank); /* they wait for this rank, which is about to go */
    else if (status != CL_OK)
        cl_group_fail(group, status, UINT32_MAX);
    return status;
}

/* ---- who may run: the calling thread ---- */

bool cl_host_queue_enter(struct cl_group *group, const struct cl_operation *operation)
{
    if (operation->plan->network_steps > 0 || group->lane_taken || group->host_queued > 0)
        return false;
    group->lane_taken = true;
    return true;
}

void cl_host_queue_leave(struct cl_group *group)
{
    pthread_mutex_lock(&group->lane);
    group->lane_taken = false;
    if (group->host_queued > 0)
        cl_engine_wake(group->engine);
    pthread_mutex_unlock(&group->lane); /* and not a look at the group more: it may be closed now */
}

/* ---- the engine thread's side, under core ---- */

bool cl_host_queue_is_free(struct cl_group *group)
{
    pthread_mutex_lock(&group->lane);
    bool free_lane = !group->lane_taken;
    pthread_mutex_unlock(&group->lane);
    return free_lane; /* host_queued > 0 keeps calling threads out from here on */
}

/* Whether this host operation may run now: first in the lane, the lane free, and the gate open. */
bool cl_host_queue_may_start(struct cl_group *group, const struct cl_operation *operation, bool *host_before)
{
    uint32_t behind;
    if (!operation->plan->uses_host)
        return true;
    bool first = !*host_before;
    *host_before = true;
    return first && cl_host_queue_is_free(group) && cl_host_queue_gate_is_open(group, operation, &behind);
}

/* Looks whether a blocked host operation waits for a rank that is gone, or for a group that failed. */
int cl_host_queue_check(struct cl_group *group, struct cl_operation *operation, uint64_t now_us)
{
    uint32_t rank = UINT32_MAX, value = 0;
    if (!operation->plan->uses_host)
        return CL_OK;
    if (operation->executor == NULL) {
        uint32_t behind = 0;
        bool waits = !cl_host_queue_gate_is_open(group, operation, &behind);
        bool gone =
            waits && is_gone(group, behind, now_us) && !cl_host_reached(group->host, behind, operation->host_gate);
        return reason_to_stop(group, waits ? group->local[behind] : UINT32_MAX, gone, now_us, UINT64_MAX);
    }
    for (uint32_t i = 0; cl_executor_awaits(operation->executor, i, &rank, &value); i++) {
        uint32_t index = local_index(group, rank);
        bool gone = is_gone(group, index, now_us) && !cl_host_reached(group->host, index, value);
        int status = reason_to_stop(group, rank, gone, now_us, UINT64_MAX);
        if (status != CL_OK)
            return status;
    }
    return CL_OK;
}

bool cl_host_queue_arm_bells(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us)
{
    bool host_before = false;
    for (struct cl_operation *o = group->first; o != NULL; o = o->next) {
        if (!o->plan->uses_host || host_before)
            continue;
        host_before = true;
        if (now_us + CL_SLEEP_MAX_US < *deadline_us)
            *deadline_us = now_us + CL_SLEEP_MAX_US;
        uint32_t rank, value, behind;
        if (o->executor == NULL) {
            if (!cl_host_queue_gate_is_open(group, o, &behind))
                cl_host_request_bell(group->host, behind);
            if (cl_host_queue_is_free(group) && cl_host_queue_gate_is_open(group, o, &behind))
                return false;
            continue; /* if a calling thread has the lane: it wakes the engine when it leaves */
        }
        for (uint32_t i = 0; cl_executor_awaits(o->executor, i, &rank, &value); i++) {
            uint32_t index = local_index(group, rank);
            cl_host_request_bell(group->host, index);
            if (cl_host_reached(group->host, index, value))
                return false;
        }
    }
    return true;
}
