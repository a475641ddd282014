/*
 * Submit: how any thread starts an operation. The engine thread runs it, or the calling thread does.
 */
#include <stdlib.h>

#include "engine/clock.h"
#include "engine/host_wait.h"
#include "group/p2p.h"

/* The calling thread sends no more than this itself. */
enum {
    NOW_BYTES_MAX = 65536,
    NOW_MESSAGES_MAX = 16, /* of a plan, both ways */
};

/* Hands the operation over to the engine. `now`: the calling thread may take the engine's next turn itself. */
static void submit(struct cl_member *member, struct cl_operation *operation, bool now)
{
    struct cl_engine *engine = member->engine;
    pthread_mutex_lock(&member->submitting);
    bool news = cl_member_hand_over(member, operation);
    if (news && !now)
        cl_engine_wake(engine);
    pthread_mutex_unlock(&member->submitting); /* the group may be closed and freed from here on */
    if (news && now)
        cl_engine_attend(engine, operation->kind == CL_OPERATION_PLAN);
}

/* Lets the thread that waits for the operation poll the sockets, if the operation needs packets alone. */
static void wait_for_packets(struct cl_submission *submission, struct cl_engine *engine)
{
    if (engine->packet_wait == NULL)
        return;
    submission->packet_wait = engine->packet_wait;
    cl_packet_wait_retain(submission->packet_wait);
}

/* Whether the calling thread may send the first packets of a plan itself. */
static bool is_short(const struct cl_plan *plan)
{
    return plan->network_steps > 0 && plan->network_steps <= NOW_MESSAGES_MAX && !plan->uses_host &&
           plan->sent_bytes <= NOW_BYTES_MAX;
}

static int create(cl_group *group, const struct cl_operation_request *request, struct cl_submission **out)
{
    if (group == NULL || request == NULL)
        return CL_EINVAL;
    struct cl_submission *submission = cl_submission_create();
    if (submission == NULL)
        return CL_ENOMEM;
    int status = cl_group_request(group, &submission->operation, request, cl_now_us());
    const struct cl_plan *plan = submission->operation.plan;
    if (status != CL_OK)
        free(submission);
    else if (plan->network_steps > 0 && !plan->uses_host)
        wait_for_packets(submission, cl_member_of(group)->engine);
    *out = submission;
    return status;
}

int cl_submit(cl_group *group, const struct cl_operation_request *request, cl_operation **out)
{
    struct cl_submission *submission;
    if (out == NULL)
        return CL_EINVAL;
    int status = create(group, request, &submission);
    if (status != CL_OK)
        return status;
    submit(cl_member_of(group), &submission->operation, is_short(submission->operation.plan));
    *out = &submission->operation;
    return CL_OK;
}

int cl_run(cl_group *group, const struct cl_operation_request *request)
{
    struct cl_submission *submission;
    if (request != NULL && (request->gate != NULL || request->done != NULL))
        return CL_EINVAL;
    int status = create(group, request, &submission);
    if (status != CL_OK)
        return status;
    struct cl_member *member = cl_member_of(group);
    struct cl_operation *operation = &submission->operation;
    pthread_mutex_lock(&member->submitting);
    struct cl_host_queue *queue =
        operation->plan->network_steps == 0
            ? cl_host_queues_enter(&group->host_queues, cl_class_within_host(operation->qos.priority))
            : NULL;
    bool here = queue != NULL;
    if (here)
        cl_group_order(group, operation);
    pthread_mutex_unlock(&member->submitting);
    if (here) {
        status = cl_host_wait_run(member, operation);
        cl_operation_end(operation, status, operation->times.submitted_us);
        cl_member_ended(member, operation, status);
        pthread_mutex_lock(&member->submitting);
        if (cl_host_queue_leave(queue))
            cl_engine_wake(member->engine);
        pthread_mutex_unlock(&member->submitting); /* the group may be closed and freed from here on */
    } else {
        submit(member, operation, is_short(operation->plan));
        status = cl_operation_wait(operation, 0);
    }
    cl_operation_release(operation);
    return status;
}

/* Ends the send of a short message, if its copy may wait for the receiver. */
static void end_early(struct cl_member *member, struct cl_submission *submission,
                      const struct cl_message_request *request)
{
    /* In a group that has failed, the send has to end with the error. */
    if (atomic_load(&member->group.status) != CL_OK || !cl_eager_reserve_message(&member->eager, request->length))
        return;
    if (cl_submission_end_early(submission, request->memory, request->length))
        atomic_fetch_add(&member->engine->eager_messages, 1);
    else
        cl_eager_release(&member->eager, request->length);
}

static int submit_message(cl_group *group, enum cl_operation_kind kind, const struct cl_message_request *request,
                          cl_operation **out)
{
    if (group == NULL || request == NULL || out == NULL)
        return CL_EINVAL;
    struct cl_submission *submission = cl_submission_create();
    if (submission == NULL)
        return CL_ENOMEM;
    int status = cl_group_request_message(group, &submission->operation, kind, request, cl_now_us());
    if (status != CL_OK) {
        free(submission);
        return status;
    }
    struct cl_member *member = cl_member_of(group);
    bool local = cl_p2p_may_be_local(&submission->operation);
    if (local && member->message_wait != NULL) {
        submission->message_wait = member->message_wait;
        cl_message_wait_retain(member->message_wait);
    } else {
        wait_for_packets(submission, member->engine);
    }
    if (kind == CL_OPERATION_SEND && !local && request->gate == NULL)
        end_early(member, submission, request);
    *out = &submission->operation;
    submit(member, *out, local || kind == CL_OPERATION_RECEIVE || request->length <= NOW_BYTES_MAX);
    return CL_OK;
}

int cl_send(cl_group *group, const struct cl_message_request *request, cl_operation **operation)
{
    return submit_message(group, CL_OPERATION_SEND, request, operation);
}

int cl_receive(cl_group *group, const struct cl_message_request *request, cl_operation **operation)
{
    return submit_message(group, CL_OPERATION_RECEIVE, request, operation);
}
