/*
 * Member: this process in one group. It holds what the group itself has not: locks, the mapped memory of the host, and
 * the processes of the other ranks there.
 */
#ifndef CL_ENGINE_MEMBER_H
#define CL_ENGINE_MEMBER_H

#include <pthread.h>

#include "engine/engine.h"
#include "engine/submission.h"
#include "group/group.h"
#include "os/host.h"

/* Another rank of this host, as seen by those that wait for it. */
struct cl_neighbour {
    int32_t pid;                 /* 0: not watched */
    _Atomic uint64_t looked_us;  /* when somebody looked at its process last */
    _Atomic uint64_t stopped_us; /* since when it is known to be stopped (SIGSTOP); 0: it runs */
};

struct cl_member {
    struct cl_group group; /* first: the public cl_group is its address */
    struct cl_engine *engine;
    struct cl_host *host;
    struct cl_neighbour *neighbours; /* by local index */
    pthread_mutex_t submitting;      /* the order of submission, and who may run operations in the host's memory */
    uint64_t spin_us;
    uint64_t spin_ewma_us; /* how long recent waits of calling threads took */
};

static inline struct cl_member *cl_member_of(cl_group *group)
{
    return (struct cl_member *)group;
}

/* Under `submitting`: gives the operation its place in the order of submission, and hands it over to the engine.
 * Returns whether the engine must be told. */
bool cl_member_hand_over(struct cl_member *member, struct cl_operation *operation);
/* An operation of the member has ended: counts it and tells its caller. */
void cl_member_ended(struct cl_member *member, struct cl_operation *operation, int status);

#endif
