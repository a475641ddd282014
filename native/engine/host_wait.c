#include "engine/host_wait.h"

#include "engine/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define relax() _mm_pause()
#else
#include <sched.h>
#define relax() sched_yield()
#endif

/* Notes for cl_group_awaited the counters that the operation waits for, or (!waits) none. */
static void note_waits(struct cl_member *member, const struct cl_operation *operation, bool waits)
{
    const struct cl_host_queues *queues = &member->group.host_queues;
    const struct cl_host_turn *turn = &operation->turn;
    bool gated = operation->executor == NULL;
    uint32_t rank, value;
    for (uint32_t i = 0; i < queues->local_count; i++)
        atomic_store(&member->neighbours[i].sleeps_for[turn->queue], waits && gated ? turn->gate + UINT64_C(1) : 0);
    for (uint32_t n = 0; waits && !gated && cl_executor_awaits(operation->executor, n, &rank, &value); n++)
        atomic_store(&member->neighbours[queues->index[rank]].sleeps_for[turn->queue], value + UINT64_C(1));
}

static int wait_for(struct cl_member *member, const struct cl_operation *operation, uint32_t index, uint32_t value)
{
    uint64_t deadline_us = operation->deadline_us;
    const struct cl_host_queue *queue = &member->group.host_queues.queues[operation->turn.queue];
    uint64_t start = cl_now_us(), now = start;
    uint64_t limit = member->spin_us, ewma = atomic_load_explicit(&member->spin_ewma_us, memory_order_relaxed);
    if (limit > 0 && ewma <= limit) {
        while (now - start < limit) {
            for (int i = 0; i < 64; i++) {
                if (cl_host_queue_reached(queue, index, value))
                    goto reached;
                relax();
            }
            now = cl_now_us();
        }
    }
    int status = CL_OK;
    note_waits(member, operation, true);
    while (!cl_host_queue_reached(queue, index, value)) {
        status = cl_group_check_host(&member->group, operation, now, deadline_us);
        if (status != CL_OK)
            break;
        uint64_t left = deadline_us - now < CL_SLEEP_MAX_US ? deadline_us - now : CL_SLEEP_MAX_US;
        cl_host_sleep(member->host, operation->turn.queue, index, value, left);
        now = cl_now_us();
    }
    note_waits(member, operation, false);
    if (status != CL_OK)
        return status;
reached:
    now = cl_now_us();
    /* The cap is for one late rank, which must not turn spinning off for long. */
    uint64_t took = now - start > 4 * limit ? 4 * limit : now - start;
    atomic_store_explicit(&member->spin_ewma_us, (7 * ewma + took) / 8, memory_order_relaxed);
    return CL_OK;
}

/* Polls the executor until the plan is done. */
static int run_plan(struct cl_member *member, struct cl_operation *operation)
{
    for (uint64_t now = operation->started_us;; now = cl_now_us()) {
        enum cl_progress progress = cl_executor_poll(operation->executor, SIZE_MAX, now);
        uint32_t rank, value;
        if (progress == CL_PROGRESS_DONE)
            return CL_OK;
        if (progress == CL_PROGRESS_FAILED) {
            int status = cl_executor_status(operation->executor);
            cl_group_fail(&member->group, status, cl_executor_culprit(operation->executor));
            return status;
        }
        if (!cl_executor_awaits(operation->executor, 0, &rank, &value))
            return CL_EINVAL; /* a plan that waits for nothing; cl_plan_create refuses those */
        uint32_t index = member->group.host_queues.index[rank];
        int status = wait_for(member, operation, index, value);
        if (status != CL_OK)
            return status;
    }
}

int cl_host_wait_run(struct cl_member *member, struct cl_operation *operation)
{
    struct cl_group *group = &member->group;
    const struct cl_host_turn *turn = &operation->turn;
    uint32_t behind = 0;
    bool host = operation->plan->uses_host;
    int status = cl_group_check(group);
    while (status == CL_OK && host && !cl_host_queues_gate_is_open(&group->host_queues, turn, &behind))
        status = wait_for(member, operation, behind, turn->gate);
    if (status == CL_OK)
        status = cl_group_start(group, operation, operation->times.submitted_us);
    if (status == CL_OK)
        status = run_plan(member, operation);
    if (host && status == CL_OK) /* only then: the post says that all data is there */
        cl_host_queues_end(&group->host_queues, turn);
    else if (host && status == CL_ECLOSED)
        cl_host_abort(member->host, CL_EABORTED, group->rank); /* this rank leaves, and the others wait for it */
    else if (status != CL_OK)
        cl_group_fail(group, status, UINT32_MAX);
    return status;
}
