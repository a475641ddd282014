/*
 * Group: one rank's part of a communicator: the order of its operations, which of them run, and how it fails.
 *
 * Operations that need packets run in cl_group_progress, any number at a time; of those that touch the host's shared
 * memory one per queue at a time, in the order of submission (host_queue.h), the most urgent class first.
 *
 * All ranks must submit the same operations in the same order. Each operation carries a signature of everything that
 * was submitted so far, which other ranks compare: in packets (protocol/signatures.h) and, in the host's memory, beside
 * the counter.
 *
 * The engine and the simulator run this code. Calls must be serialised, except those marked "any thread";
 * cl_group_order only with itself and the other submissions.
 */
#pragma once

#include "group/held.h"
#include "group/waiting.h"

enum {
    CL_WORK_BUDGET_BYTES = 1 << 20, /* local copying between two looks at the sockets */
    /* ... of operations in shared memory beside one of a more urgent class, or an older one of the same class. While
     * that one uses its budget up, they have every CL_HOST_QUEUE_GUARD-th turn only. */
    CL_WORK_BUDGET_BESIDE_BYTES = 128 << 10,
    CL_HOST_QUEUE_GUARD = 8,
    CL_STARTS_BUDGET = 256,   /* operations started between two looks at the sockets */
    CL_SLEEP_MAX_US = 100000, /* no wait is longer: a lost wake-up costs this much, never a hang */
};

struct cl_group {
    uint32_t id, rank, size;
    uint16_t *peers;
    _Atomic int32_t status; /* CL_OK, or why it failed */
    _Atomic uint32_t culprit;
    bool announced;               /* the peers have been told that it failed */
    struct cl_endpoint *endpoint; /* NULL: shared memory only */
    struct cl_group_io io;
    /* those of the latest operation; submissions are serialised */
    uint32_t sequence;
    uint64_t signature;
    struct cl_host_queues host_queues;
    struct cl_mailbox mailbox;
    struct cl_channels channels;
    struct cl_held held;                                   /* those that may not start so far; and then: */
    struct cl_operation_list in_flight;                    /* those that do not use the host's memory ... */
    struct cl_waiting waiting;                             /* ... and of these, the ones with nothing to do */
    struct cl_operation_list host_flight[CL_GROUP_QUEUES]; /* those that do, by queue */
    /* in the list of all groups: see groups.h */
    struct cl_groups *groups;
    struct cl_group *next, *next_awake;
    bool awake;
    uint32_t urgent_class; /* the most urgent class at the start of a turn; CL_CLASSES: none */
};

/* CL_EINVAL for ranks that do not fit together, or CL_ENOMEM; cl_group_free also after a failure. */
int cl_group_init(struct cl_group *group, const struct cl_group_options *options, struct cl_endpoint *endpoint,
                  const struct cl_group_io *io);
void cl_group_free(struct cl_group *group);

/* ---- submission ---- */

/* Makes an operation for this group; CL_EINVAL, CL_ENOMEM: it need not be freed then. Any thread. */
int cl_group_request(struct cl_group *group, struct cl_operation *operation, const struct cl_operation_request *request,
                     uint64_t now_us);
int cl_group_request_message(struct cl_group *group, struct cl_operation *operation, enum cl_operation_kind kind,
                             const struct cl_message_request *request, uint64_t now_us);
/* Gives the operation the next place in the group's order of submission. Point-to-point operations have none. */
void cl_group_order(struct cl_group *group, struct cl_operation *operation);
/* Counts an operation that will be taken: calling threads keep out of the host's memory until it has ended. It needs
 * the same lock as cl_group_order. */
void cl_group_queue(struct cl_group *group, struct cl_operation *operation);
/* Takes a queued operation into the list of those in flight, in the order in which they were queued: a part of
 * cl_groups_take. */
void cl_group_take(struct cl_group *group, struct cl_operation *operation);
/* Creates the executor of an operation that has its order. */
int cl_group_start(struct cl_group *group, struct cl_operation *operation, uint64_t now_us);

/* ---- progress ---- */

/* Runs what can run; in shared memory, within the budget. Returns whether there is more to do at once. *deadline_us is
 * lowered to the next one. */
bool cl_group_progress(struct cl_group *group, size_t budget, uint64_t now_us, uint64_t *deadline_us);
/* The most urgent class of its operations in shared memory, and of all its operations; CL_CLASSES: none. */
uint32_t cl_group_host_class(const struct cl_group *group);
uint32_t cl_group_urgent_class(const struct cl_group *group);
/* Whether the group has nothing to do until it is woken: see groups.h. Asks for the bell first. */
bool cl_group_may_sleep(struct cl_group *group);
/* Whether it has operations, and all have ended for their callers. */
bool cl_group_only_trails(const struct cl_group *group);
/* Asks for bells for whatever the group's operations wait for, and lowers *deadline_us in case one is lost; false when
 * something moved meanwhile. */
bool cl_group_arm_bells(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us);
/* A message of one of its operations ended. */
void cl_group_complete(const struct cl_completion *completion);
/* The group's status. First looks whether another rank of the host has failed the group. Any thread. */
int cl_group_check(struct cl_group *group);
/* Looks whether a local rank that an operation in shared memory waits for will never come: then fails the group, and
 * returns the reason. CL_OK: wait on. Only the thread that runs the operation. */
int cl_group_check_host(struct cl_group *group, const struct cl_operation *operation, uint64_t now_us,
                        uint64_t deadline_us);

/* Sets awaited[rank] to 1 for each rank that a plan in flight waits for and has not heard of, and for each rank of the
 * host that keeps the gate of the first plan of a host queue closed. Operations of calling threads do not count. */
void cl_group_await(const struct cl_group *group, uint8_t *awaited);

/* ---- its end ---- */

/* Marks the group failed; the first reason stays. Any thread. */
void cl_group_fail(struct cl_group *group, int reason, uint32_t culprit);
/* Notes that another rank has failed the group. Any thread. */
void cl_group_hear(struct cl_group *group, int reason, uint32_t culprit);
/* The same, from a peer. */
void cl_group_hear_of(struct cl_group *group, const struct cl_closed_group *aborted);
/* Notes that the process of a local peer died. */
void cl_group_peer_died(struct cl_group *group, uint16_t peer);
/* Ends what is in flight with the group's status, and forgets the group at the endpoint. */
void cl_group_leave(struct cl_group *group, uint64_t now_us);
