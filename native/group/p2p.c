#include "group/p2p.h"

#include <stddef.h>
#include <stdlib.h>

enum {
    MESSAGE_LIMIT_BYTES = 16 << 20, /* as in plans/partition.py */
    MESSAGES_INLINE = 16,
};

/* A plan between rank 0, which is this one, and rank 1, the other. The plan does not depend on the other's rank. */
static int make_plan(enum cl_step_kind kind, uint64_t length, cl_plan **plan)
{
    uint64_t messages = cl_mailbox_messages(length, MESSAGE_LIMIT_BYTES);
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
    struct cl_plan_options options = {.steps = steps,
                                      .step_count = (uint32_t)messages,
                                      .world_size = 2,
                                      .input_bytes = length,
                                      .output_bytes = length};
    int status = cl_plan_create(&options, plan);
    if (steps != few)
        free(steps);
    return status;
}

/* The plan of operations that use a channel only. */
static struct cl_plan no_steps = {.references = 1, .world_size = 2};

int cl_p2p_request(struct cl_operation *operation, struct cl_group *group, struct cl_channels *channels,
                   enum cl_operation_kind kind, const struct cl_message_request *request, uint64_t now_us)
{
    if (request->tag == UINT32_MAX || (request->memory == NULL && request->length > 0) ||
        request->priority > CL_CLASS_YIELDS || request->length / MESSAGE_LIMIT_BYTES >= UINT32_MAX / 2)
        return CL_EINVAL;
    bool local = request->rank != CL_ANY_SOURCE && cl_channels_with(channels, request->rank) != NULL;
    cl_plan *plan = &no_steps;
    int status = CL_OK;
    if (!local)
        status = make_plan(kind == CL_OPERATION_SEND ? CL_SEND : CL_RECV_COPY, request->length, &plan);
    if (status != CL_OK)
        return status;
    cl_operation_init(operation, group, kind, plan, request->memory, request->memory);
    if (!local)
        cl_plan_release(plan); /* the operation has its own hold on it */
    operation->transfer = (struct cl_transfer){
        .memory = request->memory, .length = request->length, .tag = request->tag, .class = (uint8_t)request->priority};
    operation->arithmetic.element_bytes = 1;
    operation->qos.priority = (uint8_t)request->priority;
    operation->times.submitted_us = now_us;
    operation->timeout_us = request->timeout_us;
    operation->deadline_us = cl_deadline_after(now_us, request->timeout_us);
    operation->gate = kind == CL_OPERATION_SEND ? (const _Atomic uint32_t *)request->gate : NULL;
    operation->done = (_Atomic uint32_t *)request->done;
    operation->ticket = (struct cl_ticket){.source = request->rank, .tag = request->tag};
    operation->sequence = request->tag;
    return CL_OK;
}

/* Begins the transfer of an operation that knows its other rank now, if that is on this host. */
static int set_name(struct cl_operation *operation, struct cl_mailbox *mailbox)
{
    struct cl_channels *channels = mailbox->channels;
    struct cl_channel *channel = channels == NULL ? NULL : cl_channels_with(channels, operation->ticket.source);
    if (channel == NULL) {
        operation->name = CL_NAMED;
        operation->pair[1] = mailbox->peers[operation->ticket.source];
        return CL_OK;
    }
    operation->name = CL_LOCAL;
    return operation->kind == CL_OPERATION_SEND ? cl_channel_send(channels, channel, &operation->transfer)
                                                : cl_channel_receive(channels, channel, &operation->transfer);
}

static bool is_local(const struct cl_operation *operation)
{
    return operation->plan == &no_steps;
}

bool cl_p2p_may_be_local(const struct cl_operation *operation)
{
    return is_local(operation) || operation->ticket.source == CL_ANY_SOURCE;
}

int cl_p2p_bind(struct cl_operation *operation, struct cl_mailbox *mailbox, uint64_t now_us)
{
    struct cl_ticket *ticket = &operation->ticket;
    int status = CL_OK;
    if (operation->name == CL_WAITING)
        return cl_mailbox_deserted(mailbox, now_us) ? CL_EPEERLOST : CL_EAGAIN;
    if (operation->name != CL_UNNAMED)
        return CL_OK;
    if (mailbox->channels != NULL)
        mailbox->channels->now_us = now_us;
    if (operation->kind == CL_OPERATION_RECEIVE)
        status = cl_mailbox_receive(mailbox, ticket, now_us);
    else if (!is_local(operation) &&
             !cl_mailbox_send(mailbox, ticket->source, ticket->tag, operation->plan->step_count, &ticket->index))
        status = CL_ENOMEM;
    if (status == CL_OK)
        status = set_name(operation, mailbox);
    else if (status == CL_EAGAIN)
        operation->name = CL_WAITING;
    return status;
}

int cl_p2p_next(struct cl_mailbox *mailbox, struct cl_operation **operation)
{
    struct cl_ticket *ticket = cl_mailbox_next(mailbox);
    *operation = NULL;
    if (ticket == NULL)
        return CL_OK;
    *operation = (struct cl_operation *)(void *)((char *)ticket - offsetof(struct cl_operation, ticket));
    return set_name(*operation, mailbox);
}
