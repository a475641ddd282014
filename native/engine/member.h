/*
 * Member: this process in one group. A group (group/group.h) has no lock, thread or memory mapping; its member has
 * them: the lock of submission, the mapped memory of the host, and the processes of the other ranks there.
 */
#pragma once

#include <pthread.h>

#include "engine/engine.h"
#include "engine/message_wait.h"
#include "engine/submission.h"
#include "group/eager.h"
#include "group/group.h"
#include "os/host.h"

/* The process of another rank of this host. */
struct cl_neighbour {
    int32_t pid;                                  /* 0: not watched */
    _Atomic uint64_t looked_us;                   /* the latest look at its state */
    _Atomic uint64_t stopped_us;                  /* the first look that found it stopped (SIGSTOP); 0: it runs */
    _Atomic uint64_t sleeps_for[CL_GROUP_QUEUES]; /* 1 + the counter of it that a calling thread sleeps for; 0: none */
};

/* See struct cl_lag. Any thread that ends an operation adds. */
struct cl_member_lag {
    _Atomic uint64_t last, waited_us;
};

struct cl_member {
    struct cl_group group; /* first: the public cl_group is its address */
    struct cl_engine *engine;
    struct cl_host *host;
    struct cl_neighbour *neighbours; /* by local index */
    struct cl_member_lag *lags;      /* by rank */
    pthread_mutex_t submitting;      /* makes the order of submission; guards entry to the host queues */
    struct cl_eager eager;
    uint64_t spin_us;
    _Atomic uint64_t spin_ewma_us;        /* how long recent waits of calling threads took */
    struct cl_message_wait *message_wait; /* NULL: no other rank on this host */
};

static inline struct cl_member *cl_member_of(cl_group *group)
{
    return (struct cl_member *)group;
}

/* Gives the operation its place in the order of submission, and hands it over to the engine; the caller holds
 * `submitting`. Returns whether the engine must be told. */
bool cl_member_hand_over(struct cl_member *member, struct cl_operation *operation);
/* An operation of the member `context` has ended: counts it and tells its caller. See group/io.h. */
void cl_member_ended(void *context, struct cl_operation *operation, int status);
/* Waits until every copy of an eager message has been acknowledged, the group has failed, or the time is over. */
void cl_member_flush(const struct cl_member *member);
