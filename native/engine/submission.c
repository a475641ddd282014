#include "engine/submission.h"

#include <linux/futex.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/clock.h"

enum { NOTIFY_NONE = 0, NOTIFY_ASKED = 1, NOTIFY_DONE = 2 };

_Static_assert(offsetof(struct cl_submission, operation) == 0, "cl_operation is the submission's address");

static struct cl_submission *submission_of(cl_operation *operation)
{
    return (struct cl_submission *)operation;
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

struct cl_submission *cl_submission_create(void)
{
    struct cl_submission *submission = calloc(1, sizeof *submission);
    if (submission == NULL)
        return NULL;
    atomic_init(&submission->references, 2);
    atomic_init(&submission->status, CL_EAGAIN);
    return submission;
}

bool cl_submission_end_early(struct cl_submission *submission, const void *memory, uint64_t length)
{
    struct cl_operation *operation = &submission->operation;
    if (length > 0) {
        submission->copy = malloc(length);
        if (submission->copy == NULL)
            return false;
        memcpy(submission->copy, memory, length);
        operation->input = submission->copy;
    }
    uint64_t now_us = cl_now_us();
    submission->early = true;
    submission->times = (struct cl_operation_times){operation->times.submitted_us, now_us, now_us};
    cl_operation_write_done(operation, CL_OK);
    atomic_store(&submission->notify, NOTIFY_DONE);
    atomic_store(&submission->status, CL_OK);
    atomic_store(&submission->done, 1);
    return true;
}

static void publish(struct cl_submission *submission, int status, struct cl_events *events)
{
    submission->times = submission->operation.times;
    cl_operation_write_done(&submission->operation, status);
    atomic_store(&submission->status, status);
    atomic_store(&submission->done, 1);
    futex(&submission->done, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL);
    if (submission->packet_wait != NULL)
        cl_packet_wait_end(submission->packet_wait, &submission->done);
    if (atomic_exchange(&submission->notify, NOTIFY_DONE) == NOTIFY_ASKED)
        cl_events_push(events, submission->token, status);
}

void cl_submission_publish_early(struct cl_submission *submission, struct cl_events *events)
{
    publish(submission, CL_OK, events);
}

void cl_submission_end(struct cl_submission *submission, int status, struct cl_events *events)
{
    if (submission->early) {
        free(submission->copy); /* the caller may keep its handle for long */
        submission->copy = NULL;
        cl_operation_release(&submission->operation);
        return;
    }
    publish(submission, status, events);
    cl_operation_release(&submission->operation);
}

int cl_operation_status(cl_operation *operation)
{
    return atomic_load(&submission_of(operation)->status);
}

int cl_operation_wait(cl_operation *operation, uint64_t timeout_us)
{
    struct cl_submission *submission = submission_of(operation);
    uint64_t deadline = cl_deadline_after(cl_now_us(), timeout_us);
    if (submission->message_wait != NULL && atomic_load(&submission->done) == 0)
        cl_message_wait_for(submission->message_wait, &submission->done, deadline);
    struct cl_packet_wait *packets = submission->packet_wait;
    if (packets != NULL && atomic_load(&submission->done) == 0)
        cl_packet_wait_for(packets, &submission->done, deadline);
    if (packets != NULL)
        atomic_fetch_add(&packets->sleepers, 1);
    while (atomic_load(&submission->done) == 0) {
        uint64_t now = cl_now_us();
        if (now >= deadline)
            break;
        uint64_t left = deadline - now < 1000000 ? deadline - now : 1000000;
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000), .tv_nsec = (long)(left % 1000000) * 1000};
        futex(&submission->done, FUTEX_WAIT_PRIVATE, 0, &timeout);
    }
    if (packets != NULL) {
        atomic_fetch_sub(&packets->sleepers, 1);
        cl_packet_wait_note(packets);
    }
    return atomic_load(&submission->done) == 0 ? CL_EAGAIN : atomic_load(&submission->status);
}

int cl_operation_notify(cl_operation *operation, uint64_t token)
{
    struct cl_submission *submission = submission_of(operation);
    uint32_t expected = atomic_load(&submission->notify);
    if (expected == NOTIFY_ASKED)
        return CL_EINVAL; /* the token is the first one's */
    if (atomic_load(&submission->done) != 0)
        return atomic_load(&submission->status); /* a caller that has waited for the end must not wait for an event */
    submission->token = token; /* published by the exchange below, and read only where NOTIFY_ASKED is seen */
    expected = NOTIFY_NONE;
    if (atomic_compare_exchange_strong(&submission->notify, &expected, NOTIFY_ASKED))
        return CL_EAGAIN;
    return expected == NOTIFY_ASKED ? CL_EINVAL : atomic_load(&submission->status);
}

int cl_operation_missing(cl_operation *operation, struct cl_range *ranges, uint32_t capacity)
{
    const struct cl_ranges *uncounted = &operation->missing.uncounted;
    int status = cl_operation_status(operation);
    if (status != CL_OK)
        return status;
    for (uint32_t i = 0; i < uncounted->count && i < capacity; i++)
        ranges[i] = uncounted->list[i];
    return (int)uncounted->count;
}

int cl_operation_times(cl_operation *operation, struct cl_operation_times *times)
{
    if (operation == NULL || times == NULL)
        return CL_EINVAL;
    if (cl_operation_status(operation) == CL_EAGAIN)
        return CL_EAGAIN;
    *times = submission_of(operation)->times;
    return CL_OK;
}

int cl_operation_source(cl_operation *operation, uint32_t *rank)
{
    if (operation == NULL || rank == NULL || operation->kind != CL_OPERATION_RECEIVE)
        return CL_EINVAL;
    int status = cl_operation_status(operation);
    if (status == CL_OK)
        *rank = operation->ticket.source;
    return status;
}

void cl_operation_release(cl_operation *operation)
{
    struct cl_submission *submission = submission_of(operation);
    if (operation == NULL || atomic_fetch_sub(&submission->references, 1) != 1)
        return;
    cl_operation_free(operation);
    cl_message_wait_release(submission->message_wait);
    cl_packet_wait_release(submission->packet_wait);
    free(submission->copy);
    free(submission);
}
