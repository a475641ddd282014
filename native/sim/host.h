/*
 * Host: what the ranks of one host share in one group (os/host.h): by queue, counters, signatures and bells; by class,
 * two halves of staging each; and rings for messages. A member is one rank's part of the group: the production group of
 * native/group/ in virtual surroundings.
 */
#ifndef CL_SIM_HOST_H
#define CL_SIM_HOST_H

#include "group/eager.h"
#include "group/group.h"
#include "sim/clock.h"

enum { SIM_RING_BYTES = CL_RING_HEAD_BYTES + CL_RING_DATA_BYTES_MIN }; /* small: rings that are full */

struct sim_rank;

struct sim_member {
    struct cl_group group; /* first: groups are members */
    struct sim_rank *rank; /* NULL: it is no member */
    uint32_t self;         /* its rank in the group */
    struct sim_host *host;
    struct sim_event event; /* opens or closes it */
    enum { SIM_OUTSIDE, SIM_COMING, SIM_INSIDE, SIM_LEAVING, SIM_LEFT } state;
    uint32_t in_flight;
    struct cl_eager eager;
    int status;                              /* of the group when it was closed */
    bool failed;                             /* and it has been said */
    void (*ring)(struct sim_member *member); /* its bell, which names no group; NULL: nobody hears it */
    void (*ended)(void *member, struct cl_operation *operation, int status); /* of its group: see group/io.h */
    bool (*early)(void *member, struct cl_operation *operation);
};

struct sim_host {
    uint32_t local_count;
    uint32_t *local; /* group ranks, ascending */
    struct sim_member **members;
    bool *left;
    struct sim_host_queue {
        _Atomic uint32_t *counters;
        _Atomic uint64_t *signatures; /* of each rank, two: of its operations, by parity */
        bool *bells;                  /* [poster * local_count + waiter]: wake the waiter at the next post */
    } queues[CL_GROUP_QUEUES];
    uint8_t *staging[CL_CLASSES]; /* of each rank, two halves; NULL in classes without operations */
    uint64_t staging_bytes;
    /* messages */
    _Atomic uint32_t *requests;
    enum { SIM_LISTENS_TO_NOTHING, SIM_LISTENS_TO_REQUESTS, SIM_LISTENS_TO_ALL } * listens;
    uint8_t *rings; /* [from * local_count + to] */
    int aborted;    /* the first reason stays */
    uint32_t culprit;
};

/* `classes`: a bit for each class that operations have. */
void sim_host_init(struct sim_host *host, uint32_t local_count, uint64_t staging_bytes, uint8_t classes);
void sim_host_free(struct sim_host *host);

/* Makes a group with the host's memory. `io` has the functions that concern ranks: wake, ended,
 * read_memory; the others are filled in. */
void sim_member_open(struct sim_member *member, struct sim_rank *rank, struct sim_host *host,
                     const struct cl_group_options *options, struct cl_endpoint *endpoint, struct cl_group_io io);

/* The status of its group; that of the last one, once it has left. */
static inline int sim_member_status(const struct sim_member *member)
{
    return member->state == SIM_LEFT ? member->status : atomic_load(&member->group.status);
}
/* Its rank leaves: it posts no more. */
void sim_member_leave(struct sim_member *member);

#endif
