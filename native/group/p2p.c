/*
 * Point-to-point operations: a plan of one send or receive between two, named by the group's mailbox.
 *
 * They share nothing with the group's collectives but its fate: they have their own names (group/mailbox.h), are no
 * part of the order of submission, and any number of them is in flight at a time.
 */
#include "engine/engine.h"

#include <stddef.h>
#include <stdlib.h>

#include "kernels/reduce.h"

enum {
    MESSAGE_LIMIT_BYTES = 16 << 20, /* as in plans/partition.py */
    MESSAGES_INLINE = 16,
    NOW_BYTES_MAX = 65536, /* a calling thread puts no more than this on the wire itself */
};

/* A plan between ranks 0, this one, and 1, the other: so it does not depend on who that is. */
static int make_plan(enum cl_step_kind kind, uint64_t length, cl_plan **plan)
{
    uint64_t messages = cl_mailbox_messages(length, MESSAGE_LIMIT_BYTES);
    if (messages > UINT32_MAX / 2)
        return CL_EINVAL;
    struct cl_step few[MESSAGES_INLINE], *steps = few;
    if (messages > MESSAGES_INLINE && (steps = malloc(messages * sizeof *steps)) == NULL)
        return CL_ENOMEM;
    for (uint32_t i = 0; i < messages; i++) {
        uint64_t offset = (uint64_t)i * MESSAGE_LIMIT_BYTES;
        steps[i] = (struct cl_step){.kind = (uint16_t)kind,
                                    .peer = 1,
                                    .source = CL_INPUT,
                                    .target = CL_OUTPUT,
                                    .source_offset = offset,
                                    .target_offset = offset,
                                    .length = i + 1 < messages ? MESSAGE_LIMIT_BYTES : length - offset,
                                    .message = i};
    }
    int status = cl_plan_create(steps, (uint32_t)messages, NULL, 0, 0, 2, length, length, 0, 0, plan);
    if (steps != few)
        free(steps);
    return status;
}

static int submit(cl_group *group, enum cl_operation_kind kind, uint32_t rank, uint32_t tag, void *memory,
                  uint64_t length, uint32_t priority, uint64_t timeout_us, cl_operation **out)
{
    static const struct cl_arithmetic none = {.element_bytes = 1};
    if (group == NULL || out == NULL || tag == UINT32_MAX || (memory == NULL && length > 0) || priority > 7 ||
        group->mailbox.endpoint == NULL || group->size < 2)
        return CL_EINVAL;
    bool any = kind == CL_OPERATION_RECEIVE && rank == CL_ANY_SOURCE;
    if (!any && (rank >= group->size || rank == group->rank))
        return CL_EINVAL;
    cl_plan *plan;
    int status = make_plan(kind == CL_OPERATION_SEND ? CL_SEND : CL_RECV_COPY, length, &plan);
    if (status != CL_OK)
        return status;
    struct cl_operation *operation;
    status = cl_operation_new(group, kind, plan, memory, memory, &none, priority, timeout_us, &operation);
    cl_plan_release(plan); /* the operation has its own hold on it */
    if (status != CL_OK)
        return status;
    operation->ticket = (struct cl_ticket){.source = rank, .tag = tag};
    operation->sequence = tag;
    cl_group_submit(group, operation, kind == CL_OPERATION_RECEIVE || length <= NOW_BYTES_MAX);
    *out = operation;
    return CL_OK;
}

int cl_send(cl_group *group, uint32_t rank, uint32_t tag, const void *data, uint64_t length, uint32_t priority,
            uint64_t timeout_us, cl_operation **operation)
{
    return submit(group, CL_OPERATION_SEND, rank, tag, (void *)(uintptr_t)data, length, priority, timeout_us,
                  operation);
}

int cl_receive(cl_group *group, uint32_t rank, uint32_t tag, void *target, uint64_t length, uint64_t timeout_us,
               cl_operation **operation)
{
    return submit(group, CL_OPERATION_RECEIVE, rank, tag, target, length, 0, timeout_us, operation);
}

int cl_operation_source(cl_operation *operation, uint32_t *rank)
{
    if (operation == NULL || rank == NULL || operation->kind != CL_OPERATION_RECEIVE)
        return CL_EINVAL;
    int status = atomic_load(&operation->status);
    if (status == CL_OK)
        *rank = operation->ticket.source;
    return status;
}

/* ---- the engine thread's side, under core ---- */

static void set_name(struct cl_operation *operation)
{
    operation->name = CL_NAMED;
    operation->pair[1] = operation->group->peers[operation->ticket.source];
}

int cl_p2p_bind(struct cl_operation *operation, uint64_t now_us)
{
    struct cl_mailbox *mailbox = &operation->group->mailbox;
    struct cl_ticket *ticket = &operation->ticket;
    int status = CL_OK;
    if (operation->name == CL_WAITING)
        return cl_mailbox_deserted(mailbox, now_us) ? CL_EPEERLOST : CL_EAGAIN;
    if (operation->name == CL_NAMED)
        return CL_OK;
    if (operation->kind == CL_OPERATION_RECEIVE)
        status = cl_mailbox_receive(mailbox, ticket, now_us);
    else if (!cl_mailbox_send(mailbox, ticket->source, ticket->tag, operation->plan->step_count, &ticket->index))
        status = CL_ENOMEM;
    if (status == CL_OK)
        set_name(operation);
    else if (status == CL_EAGAIN)
        operation->name = CL_WAITING;
    return status;
}

struct cl_operation *cl_p2p_next(struct cl_group *group)
{
    struct cl_ticket *ticket = cl_mailbox_next(&group->mailbox);
    if (ticket == NULL)
        return NULL;
    struct cl_operation *operation =
        (struct cl_operation *)(void *)((char *)ticket - offsetof(struct cl_operation, ticket));
    set_name(operation);
    return operation;
}
