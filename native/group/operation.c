/*
 * Operations: one submitted plan each, waited for by futex or announced by an event.
 */
#include "engine/engine.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernels/reduce.h"

enum { NOTIFY_NONE = 0, NOTIFY_ASKED = 1, NOTIFY_DONE = 2 };

static uint64_t deadline_after(uint64_t timeout_us)
{
    uint64_t now = cl_now_us();
    return timeout_us == 0 || timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

int cl_operation_create(struct cl_group *group, struct cl_plan *plan, void *input, void *output, int dtype, int op,
                        uint32_t priority, uint64_t timeout_us, struct cl_operation **out)
{
    if (group == NULL || plan == NULL || priority > 7 || dtype < 0 || op < 0)
        return CL_EINVAL;
    cl_reduce_fn reduce = cl_reduce_kernel((enum cl_dtype)dtype, (enum cl_op)op);
    cl_scale_fn scale = cl_scale_kernel((enum cl_dtype)dtype);
    if (reduce == NULL || scale == NULL || plan->world_size != group->size || plan->rank != group->rank)
        return CL_EINVAL;
    if (plan->network_steps > 0 && group->engine->wire == NULL)
        return CL_EINVAL;
    for (uint32_t i = 0; i < plan->host_rank_count; i++)
        if (group->counters[plan->host_ranks[i]] == NULL)
            return CL_EINVAL; /* a rank of another host */
    struct cl_arithmetic arithmetic = {cl_dtype_size((enum cl_dtype)dtype), reduce, scale, cl_copy_stream};
    int status =
        cl_operation_new(group, CL_OPERATION_PLAN, plan, input, output, &arithmetic, priority, timeout_us, out);
    if (status == CL_OK && plan->signature != 0)
        (*out)->call = (uint64_t)plan->signature << 32 | (uint32_t)(op << 8 | dtype) | 1u << 31;
    return status;
}

int cl_operation_new(struct cl_group *group, enum cl_operation_kind kind, struct cl_plan *plan, void *input,
                     void *output, const struct cl_arithmetic *arithmetic, uint32_t priority, uint64_t timeout_us,
                     struct cl_operation **out)
{
    struct cl_operation *operation = calloc(1, sizeof *operation);
    if (operation == NULL)
        return CL_ENOMEM;
    operation->kind = kind;
    atomic_init(&operation->references, 2); /* the caller's, and the engine's until it is done */
    atomic_init(&operation->status, CL_EAGAIN);
    operation->group = group;
    operation->plan = plan;
    cl_plan_retain(plan);
    operation->input = input;
    operation->output = output;
    operation->arithmetic = *arithmetic;
    operation->priority = (uint8_t)priority;
    operation->timeout_us = timeout_us;
    operation->deadline_us = deadline_after(timeout_us);
    *out = operation;
    return CL_OK;
}

int cl_operation_set_qos(struct cl_operation *operation, int dtype, int op, const struct cl_qos *qos)
{
    bool real = dtype == CL_F16 || dtype == CL_BF16 || dtype == CL_F32 || dtype == CL_F64;
    if (qos->loss_bound == 0)
        return CL_OK;
    if (!real || op != CL_SUM || !(qos->loss_bound > 0 && qos->loss_bound <= CL_LOSS_BOUND_MAX) ||
        qos->treatment > CL_ZERO || (qos->protect != NULL && qos->protect_bytes == 0))
        return CL_EINVAL;
    operation->qos = *qos;
    if (operation->call != 0) { /* what the ranks must agree on, beside the plan: in bits of their own */
        bool guarded = qos->protect != NULL || qos->protect_first > 0 || qos->protect_last > 0;
        uint32_t terms = (uint32_t)(qos->loss_bound * 1e6 + 0.5) << 3 | (uint32_t)qos->treatment << 1 | guarded;
        operation->call ^= (uint64_t)(terms * 0x9E3779B1u) << 32;
    }
    return CL_OK;
}

int cl_operation_start(struct cl_operation *operation)
{
    struct cl_group *group = operation->group;
    if (operation->plan->uses_host)
        atomic_store_explicit(group->calls[operation->host_parity][group->rank], operation->host_call,
                              memory_order_relaxed); /* the first post publishes it */
    if (operation->qos.loss_bound > 0)
        operation->started_us = cl_now_us();
    if (operation->qos.deadline_us == UINT64_MAX)
        operation->qos.deadline_us = cl_deadline_us(&operation->plan->deadline);
    bool p2p = operation->kind != CL_OPERATION_PLAN;
    struct cl_host_view view = {.staging = group->staging[operation->host_parity],
                                .calls = group->calls[operation->host_parity],
                                .call = operation->host_call,
                                .counters = group->counters,
                                .base = operation->host_base,
                                .post = (void (*)(void *, uint32_t))cl_host_post,
                                .context = group->host};
    struct cl_executor_config config = {.plan = operation->plan,
                                        .input = operation->input,
                                        .output = operation->output,
                                        .arithmetic = operation->arithmetic,
                                        .host = &view,
                                        .endpoint = group->engine->endpoint,
                                        .peers = p2p ? operation->pair : group->peers,
                                        .group = p2p ? group->id | CL_GROUP_P2P : group->id,
                                        .sequence = operation->sequence,
                                        .first_message = operation->ticket.index,
                                        .signature = operation->call == 0 ? 0 : (uint16_t)(1 + operation->call % 4095),
                                        .priority = operation->priority,
                                        .qos = operation->qos};
    return cl_executor_create(&config, &operation->executor);
}

void cl_operation_finish(struct cl_operation *operation, int status)
{
    struct cl_engine *engine = operation->group->engine;
    if (operation->qos.loss_bound > 0 && operation->executor != NULL && status == CL_OK) {
        cl_deadline_add(&operation->plan->deadline, cl_now_us() - operation->started_us);
        struct cl_missing *missing = cl_executor_missing(operation->executor);
        operation->missing = missing->uncounted;
        operation->stale = missing->stale;
        missing->uncounted = missing->stale = (struct cl_ranges){0};
    }
    cl_executor_destroy(operation->executor);
    operation->executor = NULL;
    atomic_fetch_add(status == CL_OK ? &engine->operations_done : &engine->operations_failed, 1);
    atomic_store(&operation->status, status);
    atomic_store(&operation->done, 1);
    futex(&operation->done, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL);
    if (atomic_exchange(&operation->notify, NOTIFY_DONE) == NOTIFY_ASKED)
        cl_events_push(&engine->events, operation->token, status);
    cl_operation_release(operation);
}

int cl_operation_status(cl_operation *operation)
{
    return atomic_load(&operation->status);
}

int cl_operation_wait(cl_operation *operation, uint64_t timeout_us)
{
    uint64_t deadline = deadline_after(timeout_us);
    while (atomic_load(&operation->done) == 0) {
        uint64_t now = cl_now_us();
        if (now >= deadline)
            return CL_EAGAIN;
        uint64_t left = deadline - now < 1000000 ? deadline - now : 1000000;
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000), .tv_nsec = (long)(left % 1000000) * 1000};
        futex(&operation->done, FUTEX_WAIT_PRIVATE, 0, &timeout);
    }
    return atomic_load(&operation->status);
}

int cl_operation_notify(cl_operation *operation, uint64_t token)
{
    uint32_t expected = atomic_load(&operation->notify);
    if (expected == NOTIFY_ASKED)
        return CL_EINVAL; /* the token is the first one's */
    if (atomic_load(&operation->done) != 0)
        return atomic_load(&operation->status); /* who has waited for it must not wait for an event */
    operation->token = token; /* published by the exchange below; read only by whoever sees NOTIFY_ASKED */
    expected = NOTIFY_NONE;
    if (atomic_compare_exchange_strong(&operation->notify, &expected, NOTIFY_ASKED))
        return CL_EAGAIN;
    return expected == NOTIFY_ASKED ? CL_EINVAL : atomic_load(&operation->status);
}

static int list_ranges(const cl_operation *operation, const struct cl_ranges *from, struct cl_range *ranges,
                       uint32_t capacity)
{
    int status = atomic_load(&operation->status);
    if (status != CL_OK)
        return status;
    for (uint32_t i = 0; i < from->count && i < capacity; i++)
        ranges[i] = from->list[i];
    return (int)from->count;
}

int cl_operation_missing(cl_operation *operation, struct cl_range *ranges, uint32_t capacity)
{
    return list_ranges(operation, &operation->missing, ranges, capacity);
}

int cl_operation_stale(cl_operation *operation, struct cl_range *ranges, uint32_t capacity)
{
    return list_ranges(operation, &operation->stale, ranges, capacity);
}

void cl_operation_release(cl_operation *operation)
{
    if (operation == NULL || atomic_fetch_sub(&operation->references, 1) != 1)
        return;
    cl_plan_release(operation->plan);
    cl_ranges_free(&operation->missing);
    cl_ranges_free(&operation->stale);
    free(operation);
}
