/*
 * Host queues: the operations of one group in shared memory of a host, by class of service.
 *
 * The operations of one queue run one after another, in the order of submission. Those of different queues overtake
 * each other. They run in cl_group_progress, or, when the caller waits anyway and no other operation of the class is
 * queued, in the calling thread, which saves two thread switches. An operation has the same class on all ranks of the
 * host.
 *
 * Queues of a class. A group on one host has one queue per class. A group of several hosts has two: its operations
 * mostly wait for the network, so the next one begins meanwhile. Consecutive operations of the class take turns in
 * them.
 *
 * Host counters. Each rank has a counter per queue. Each operation owns the counter values base+1 .. base+posts of its
 * plan, and base+posts+1, which every rank posts when it has ended the operation: it reads the others' staging no more.
 * Consecutive operations of a class use alternate halves of its staging, so an operation may start once every local
 * rank has ended the operation two before it (the gate). That has nearly always happened long ago on one host; with two
 * queues, it is the operation before it in its queue.
 *
 * Signatures. Beside its counter each rank publishes the signature of the operation that uses each half of its staging:
 * the number of the operation, counted over all queues, and a hash. Ranks that wait for each other compare them, also
 * with those of other queues: a rank that runs the operation in another class runs another operation.
 */
#pragma once

#include <stdatomic.h>

#include "congestion/class.h"
#include "group/io.h"
#include "plan/executor.h"

enum { CL_GROUP_QUEUES = 2 * CL_CLASSES /* the two of a class follow each other */ };

/* The class of a queue. */
static inline uint32_t cl_host_queue_class(uint32_t queue)
{
    return queue / 2;
}

/* The half of the staging of its class in which a queue runs operations of this parity. */
static inline uint32_t cl_host_queue_half(uint32_t queue, uint32_t parity)
{
    return (queue & 1) | parity;
}

struct cl_host_queue {
    struct cl_host_place *places; /* by local index */
    /* those of the next operation; submissions are serialised */
    uint32_t operations, base, previous_base;
    atomic_uint queued; /* operations handed over to cl_group_progress and still in the queue */
    atomic_bool taken;  /* a calling thread runs an operation */
};

struct cl_host_queues {
    const struct cl_group_io *io;
    uint32_t self; /* this rank's local index */
    uint32_t local_count;
    bool pairs;         /* whether each class has two queues */
    uint32_t *local;    /* local index -> group rank, ascending */
    uint32_t *index;    /* group rank -> local index; UINT32_MAX: a rank of another host */
    atomic_bool *lost;  /* by local index: the process has died */
    uint64_t sequence;  /* the number of the latest operation in any queue; submissions are serialised */
    uint32_t passed_by; /* turns in which less urgent queues had to wait: see group.c */
    struct cl_host_queue queues[CL_GROUP_QUEUES];
};

/* The place of one operation in its queue. */
struct cl_host_turn {
    uint32_t queue;
    uint32_t base; /* host counters at its start */
    uint32_t posts;
    uint32_t gate;   /* every local rank's counter must have come this far first */
    uint32_t parity; /* within its queue; of two queues it is always 0 */
    uint64_t signature;
};

/* The queues of a group of `size` ranks, of which `local` share this host's memory. The caller must cl_host_queues_map
 * each, for each queue. CL_EINVAL for a list that is not ascending, beyond size, or without `rank`; CL_ENOMEM.
 * cl_host_queues_free also after a failure. */
int cl_host_queues_init(struct cl_host_queues *queues, uint32_t size, uint32_t rank, const uint32_t *local,
                        uint32_t local_count, const struct cl_group_io *io);
void cl_host_queues_free(struct cl_host_queues *queues);
/* Gives local rank `index` its part of the shared memory of a queue. */
void cl_host_queues_map(struct cl_host_queues *queues, uint32_t queue, uint32_t index,
                        const struct cl_host_place *place);

/* The queue of the next operation of a class; submissions are serialised. */
uint32_t cl_host_queues_next(const struct cl_host_queues *queues, uint32_t class);
/* Gives an operation that posts `posts` values the next turn of its class. `signature`: of everything submitted so far.
 */
void cl_host_queues_order(struct cl_host_queues *queues, struct cl_host_turn *turn, uint32_t class, uint32_t posts,
                          uint64_t signature);
/* Takes the queue of the next operation of a class for the calling thread, whose operation has the next turn then.
 * NULL: others of the class are queued, or another thread has the queue. */
struct cl_host_queue *cl_host_queues_enter(struct cl_host_queues *queues, uint32_t class);
/* The calling thread has ended its operation. Returns whether others are queued, whose engine must be woken. */
bool cl_host_queue_leave(struct cl_host_queue *queue);

/* Whether the counter of local rank `index` has come to `value`. */
static inline bool cl_host_queue_reached(const struct cl_host_queue *queue, uint32_t index, uint32_t value)
{
    return (int32_t)(atomic_load_explicit(queue->places[index].counter, memory_order_acquire) - value) >= 0;
}
/* Whether all local ranks have come far enough for the turn; else *behind is the local index of one that has not. */
bool cl_host_queues_gate_is_open(const struct cl_host_queues *queues, const struct cl_host_turn *turn,
                                 uint32_t *behind);
/* Begins the turn: publishes its signature, and returns the memory as the executor sees it. */
struct cl_host_view cl_host_queues_begin(struct cl_host_queues *queues, const struct cl_host_turn *turn);
/* Ends the turn: tells the local ranks that this one has ended the operation. */
void cl_host_queues_end(struct cl_host_queues *queues, const struct cl_host_turn *turn);

/* Whether a wait for local rank `index` to come to `value` in a queue is in vain: CL_EMISMATCH when that rank runs
 * another operation, or this one in another class, CL_EPEERLOST when it will post no more, else CL_OK. */
int cl_host_queues_doubt(struct cl_host_queues *queues, uint32_t queue, uint32_t index, uint32_t value,
                         uint64_t now_us);
/* Whether local rank `index` runs an operation in another class than this rank, and the two classes. */
bool cl_host_queues_classes(const struct cl_host_queues *queues, uint32_t index, uint32_t *own, uint32_t *theirs);
