/*
 * Submission: an operation as the caller who submitted it holds it. The caller waits for its end by futex, or is told
 * of it by an event.
 */
#pragma once

#include "engine/events.h"
#include "engine/message_wait.h"
#include "engine/packet_wait.h"
#include "group/news.h"
#include "group/operation.h"

struct cl_submission {
    struct cl_operation operation; /* first: the public cl_operation is its address */
    atomic_uint references;        /* the caller's, and the engine's until the operation has ended */
    _Atomic int32_t status;        /* CL_EAGAIN while in flight */
    _Atomic uint32_t done;         /* futex word */
    _Atomic uint32_t notify;       /* enum in submission.c */
    uint64_t token;
    struct cl_operation_times times; /* once it is done */
    void *copy;                      /* a copy of the message, if it ended early; else NULL */
    bool early;
    struct cl_message_wait *message_wait; /* the wait for a message that may come through shared memory; else NULL */
    struct cl_packet_wait *packet_wait;   /* the wait for an operation that needs packets alone; else NULL */
    struct cl_news_item news;             /* the news of its end, which is told later */
    struct cl_news_item last;             /* the same of the engine's end, after an early one */
    int ended;                            /* its status then */
};

/* The operation in it is yet to be made; if it never is, free() the submission. NULL: no memory. The second
 * cl_operation_release frees it: one is the caller's, the other that of cl_submission_end. */
struct cl_submission *cl_submission_create(void);
/* Ends the send of a short message before the engine has it: from now on it sends a copy. False: no memory. */
bool cl_submission_end_early(struct cl_submission *submission, const void *memory, uint64_t length);
/* Publishes that an operation has ended well with which the engine goes on. Then cl_submission_end. */
void cl_submission_publish_early(struct cl_submission *submission, struct cl_events *events);
/* Publishes the status of an operation that has ended, wakes its waiters, sends its event, and drops the engine's
 * reference. Only the last, if the submission has ended early. */
void cl_submission_end(struct cl_submission *submission, int status, struct cl_events *events);
