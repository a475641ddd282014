/*
 * Host queue: the operations of one group in shared memory of a host. They run one after another, in the order of
 * submission: in cl_group_progress, or, when the caller waits anyway and no other operation is queued, in the calling
 * thread, which saves two thread switches.
 *
 * Host counters. Each operation owns the counter values base+1 .. base+posts of its plan, and base+posts+1, which every
 * rank posts when it has ended the operation: it reads the others' staging no more. Consecutive operations use
 * alternate halves of the staging, so an operation may start once every local rank has ended the operation two before
 * it (the gate). That has nearly always happened long ago.
 *
 * Signatures. Beside its counter each rank publishes the signature of the operation that uses each half of its staging.
 * Ranks that wait for each other compare them.
 */
#ifndef CL_GROUP_HOST_QUEUE_H
#define CL_GROUP_HOST_QUEUE_H

#include <stdatomic.h>

#include "group/io.h"
#include "plan/executor.h"

struct cl_host_queue {
    const struct cl_group_io *io;
    uint32_t rank, self; /* this rank, and its local index */
    uint32_t local_count;
    uint32_t *local; /* local index -> group rank, ascending */
    /* by group rank; NULL for ranks of other hosts */
    uint8_t **staging[2]; /* by parity */
    _Atomic uint64_t **signatures[2];
    _Atomic uint32_t **counters;
    atomic_bool *lost; /* by local index: the process has died */
    /* of the next operation; submissions are serialised */
    uint32_t sequence, base, previous_base;
    atomic_uint queued; /* operations handed over to cl_group_progress and not yet done */
    atomic_bool taken;  /* a calling thread runs an operation */
};

/* The place of one operation in the queue. */
struct cl_host_turn {
    uint32_t base; /* host counters at its start */
    uint32_t posts;
    uint32_t gate; /* every local rank's counter must have come this far first */
    uint32_t parity;
    uint64_t signature;
};

/* A queue of `size` ranks, of which `local` share this host's memory. The caller must cl_host_queue_map each. CL_EINVAL
 * for a list that is not ascending, beyond size, or without `rank`; CL_ENOMEM. cl_host_queue_free also after a failure.
 */
int cl_host_queue_init(struct cl_host_queue *queue, uint32_t size, uint32_t rank, const uint32_t *local,
                       uint32_t local_count, const struct cl_group_io *io);
void cl_host_queue_free(struct cl_host_queue *queue);
/* Gives local rank `index` its part of the shared memory. */
void cl_host_queue_map(struct cl_host_queue *queue, uint32_t index, _Atomic uint32_t *counter,
                       uint8_t *const staging[2], _Atomic uint64_t *const signatures[2]);
/* The local index of a group rank of this host. */
uint32_t cl_host_queue_index(const struct cl_host_queue *queue, uint32_t rank);

/* Gives an operation that posts `posts` values the next turn. `signature`: of everything submitted so far. */
void cl_host_queue_order(struct cl_host_queue *queue, struct cl_host_turn *turn, uint32_t posts, uint64_t signature);
/* Takes the queue for the calling thread if no operation is queued: the caller's operation has the next turn then. */
bool cl_host_queue_enter(struct cl_host_queue *queue);
/* The calling thread has ended its operation. Returns whether others are queued, whose engine must be woken. */
bool cl_host_queue_leave(struct cl_host_queue *queue);

/* Whether the counter of a local rank has come to `value`. */
static inline bool cl_host_queue_reached(const struct cl_host_queue *queue, uint32_t index, uint32_t value)
{
    const _Atomic uint32_t *counter = queue->counters[queue->local[index]];
    return (int32_t)(atomic_load_explicit(counter, memory_order_acquire) - value) >= 0;
}
/* Whether all local ranks have come far enough for the turn; else *behind is the local index of one that has not. */
bool cl_host_queue_gate_is_open(const struct cl_host_queue *queue, const struct cl_host_turn *turn, uint32_t *behind);
/* Begins the turn: publishes its signature, and returns the memory as the executor sees it. */
struct cl_host_view cl_host_queue_begin(struct cl_host_queue *queue, const struct cl_host_turn *turn);
/* Ends the turn: tells the local ranks that this one has ended the operation. */
void cl_host_queue_end(struct cl_host_queue *queue, const struct cl_host_turn *turn);

/* Whether a wait for local rank `index` to come to `value` is in vain: CL_EMISMATCH when that rank runs another
 * operation, CL_EPEERLOST when it will post no more, else CL_OK. */
int cl_host_queue_doubt(struct cl_host_queue *queue, uint32_t index, uint32_t value, uint64_t now_us);

#endif
