#include "group/operation.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/copy.h"
#include "kernels/reduce.h"

uint64_t cl_deadline_after(uint64_t now_us, uint64_t timeout_us)
{
    return timeout_us == 0 || timeout_us > UINT64_MAX - now_us ? UINT64_MAX : now_us + timeout_us;
}

void cl_operation_init(struct cl_operation *operation, struct cl_group *group, enum cl_operation_kind kind,
                       struct cl_plan *plan, void *input, void *output)
{
    *operation = (struct cl_operation){.group = group, .kind = kind, .plan = plan, .input = input, .output = output};
    cl_plan_retain(plan);
}

/* Adds the terms of a bound on loss to the signature, in bits of their own: the ranks must agree on them. */
static void sign_qos(struct cl_operation *operation)
{
    const struct cl_qos *qos = &operation->qos;
    bool guarded = qos->protect != NULL || qos->protect_first > 0 || qos->protect_last > 0;
    uint32_t terms = (uint32_t)(qos->loss_bound * 1e6 + 0.5) << 3 | (uint32_t)qos->treatment << 1 | guarded;
    operation->signature ^= (uint64_t)(terms * 0x9E3779B1u) << 32;
}

int cl_operation_request(struct cl_operation *operation, const struct cl_operation_request *request, uint64_t now_us)
{
    enum cl_dtype dtype = (enum cl_dtype)request->dtype;
    const struct cl_qos *qos = &request->qos;
    if (request->dtype < 0 || request->op < 0 || qos->priority > CL_CLASS_YIELDS)
        return CL_EINVAL;
    cl_reduce_fn reduce = cl_reduce_kernel(dtype, (enum cl_op)request->op);
    cl_scale_fn scale = cl_scale_kernel(dtype);
    if (reduce == NULL || scale == NULL)
        return CL_EINVAL;
    bool real = dtype == CL_F16 || dtype == CL_BF16 || dtype == CL_F32 || dtype == CL_F64;
    if (qos->loss_bound != 0 &&
        (!real || request->op != CL_SUM || !(qos->loss_bound > 0 && qos->loss_bound <= CL_LOSS_BOUND_MAX) ||
         qos->treatment > CL_ZERO || (qos->protect != NULL && qos->protect_bytes == 0)))
        return CL_EINVAL;
    operation->arithmetic = (struct cl_arithmetic){cl_dtype_size(dtype), reduce, scale, cl_copy_stream};
    operation->qos = qos->loss_bound > 0 ? *qos : (struct cl_qos){.priority = qos->priority, .order = qos->order};
    if (operation->plan->encodes && (dtype != CL_F32 || request->op != CL_SUM))
        return CL_EINVAL;
    operation->codec_key = request->codec_key;
    operation->times.submitted_us = now_us;
    operation->timeout_us = request->timeout_us;
    operation->deadline_us = cl_deadline_after(now_us, request->timeout_us);
    operation->gate = (const _Atomic uint32_t *)request->gate;
    operation->done = (_Atomic uint32_t *)request->done;
    if (operation->plan->signature != 0) {
        operation->signature =
            (uint64_t)operation->plan->signature << 32 | (uint32_t)(request->op << 8 | request->dtype) | 1u << 31;
        if (qos->loss_bound > 0)
            sign_qos(operation);
        operation->signature ^= request->codec_key * 0x9E3779B97F4A7C15u >> 32 << 32;
    }
    return CL_OK;
}

void cl_operation_free(struct cl_operation *operation)
{
    cl_plan_release(operation->plan);
    cl_missing_free(&operation->missing);
}

void cl_operation_write_done(struct cl_operation *operation, int status)
{
    if (operation->done == NULL)
        return;
    uint64_t bytes = operation->kind == CL_OPERATION_PLAN      ? operation->plan->output_bytes
                     : operation->kind == CL_OPERATION_RECEIVE ? operation->transfer.length
                                                               : 0;
    if (status != CL_OK && bytes > 0)
        memset(operation->output, 0xFF, bytes);
    atomic_store_explicit(operation->done, 1, memory_order_release);
}

uint64_t cl_operation_copied_bytes(const struct cl_operation *operation)
{
    return operation->kind == CL_OPERATION_PLAN ? operation->copied_bytes : operation->transfer.length;
}

/* Notes what the executor knows of the time of the first byte, and of the rank whose data was the last. */
static void note_times(struct cl_operation *operation)
{
    uint64_t last_us;
    if (operation->kind == CL_OPERATION_PLAN &&
        cl_executor_last(operation->executor, &operation->last_rank, &last_us) && last_us > operation->started_us)
        operation->waited_us = last_us - operation->started_us;
    operation->times.first_us = cl_executor_first_us(operation->executor);
}

bool cl_operation_may_end(struct cl_operation *operation)
{
    if (operation->kind != CL_OPERATION_PLAN || !operation->plan->mutual || operation->executor == NULL ||
        operation->early || operation->qos.loss_bound > 0 ||
        !cl_executor_may_release(operation->executor, &operation->copied_bytes))
        return false;
    note_times(operation);
    return true;
}

bool cl_operation_give_back(struct cl_operation *operation)
{
    return cl_executor_release(operation->executor, operation->copied_bytes);
}

int cl_operation_start(struct cl_operation *operation, const struct cl_operation_place *place, uint64_t now_us)
{
    bool p2p = operation->kind != CL_OPERATION_PLAN;
    struct cl_host_view view;
    if (operation->plan->uses_host)
        view = cl_host_queues_begin(place->host_queues, &operation->turn);
    operation->started_us = now_us;
    if (operation->qos.deadline_us == UINT64_MAX)
        operation->qos.deadline_us = cl_deadline_us(&operation->plan->deadline);
    struct cl_executor_config config = {.plan = operation->plan,
                                        .input = operation->input,
                                        .output = operation->output,
                                        .arithmetic = operation->arithmetic,
                                        .host = operation->plan->uses_host ? &view : NULL,
                                        .endpoint = place->endpoint,
                                        .peers = p2p ? operation->pair : place->peers,
                                        .group = p2p ? place->group | CL_GROUP_P2P : place->group,
                                        .sequence = operation->sequence,
                                        .first_message = operation->ticket.index,
                                        .signature =
                                            operation->signature == 0 ? 0 : (uint16_t)(1 + operation->signature % 4095),
                                        .priority = operation->qos.priority,
                                        .codec_key = operation->codec_key,
                                        .qos = operation->qos};
    int status = cl_executor_create(&config, &operation->executor);
    if (status == CL_OK)
        cl_executor_set_owner(operation->executor, operation);
    return status;
}

void cl_operation_end(struct cl_operation *operation, int status, uint64_t now_us)
{
    if (operation->qos.loss_bound > 0 && operation->executor != NULL && status == CL_OK) {
        cl_deadline_add(&operation->plan->deadline, now_us - operation->started_us);
        struct cl_missing *missing = cl_executor_missing(operation->executor);
        operation->missing = *missing;
        *missing = (struct cl_missing){0};
    }
    if (operation->executor != NULL)
        note_times(operation);
    else if (operation->name == CL_LOCAL)
        operation->times.first_us = operation->transfer.first_us;
    operation->times.ended_us = now_us;
    cl_executor_destroy(operation->executor);
    operation->executor = NULL;
}
