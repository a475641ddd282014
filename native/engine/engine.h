/*
 * Engine internals shared by engine.c (the thread), opening.c (opening and closing), peers.c (who is reached, and how),
 * stats.c, group.c (communicators), lane.c (their operations in shared memory), operation.c (what was submitted) and
 * p2p.c (point-to-point operations).
 *
 * Locks, always taken in this order:
 *   engine->core    everything the engine thread works on: endpoint, wire, groups' operations; held while it works;
 *   group->lane     who may run host operations, and the order of submission;
 *   engine->inbox   the hand-over from submitting threads, held for a few instructions;
 *   engine->events  completions for Python's completion thread.
 */
#ifndef CL_ENGINE_ENGINE_H
#define CL_ENGINE_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "commlayer.h"
#include "engine/events.h"
#include "group/mailbox.h"
#include "os/host.h"
#include "plan/executor.h"
#include "protocol/endpoint.h"
#include "wire/wire.h"

enum {
    CL_PEERS_MAX = 4096,
    CL_WATCHED_MAX = CL_HOST_RANKS_MAX,
    CL_SEND_BATCH = 64,
    CL_WORK_BUDGET_BYTES = 1 << 20, /* local copying between two looks at the sockets */
    CL_SLEEP_MAX_US = 100000,       /* no wait is longer: a lost wake-up costs this much, never a hang */
};

enum cl_operation_kind { CL_OPERATION_PLAN, CL_OPERATION_SEND, CL_OPERATION_RECEIVE };

struct cl_operation {
    enum cl_operation_kind kind;
    atomic_uint references;
    _Atomic int32_t status;  /* CL_EAGAIN while in flight */
    _Atomic uint32_t done;   /* futex word */
    _Atomic uint32_t notify; /* 0 nobody asked, 1 asked, 2 done */
    uint64_t token;
    struct cl_group *group;
    struct cl_plan *plan;
    uint8_t *input, *output;
    struct cl_arithmetic arithmetic;
    uint8_t priority;
    struct cl_qos qos;               /* all zero: reliable */
    struct cl_ranges missing, stale; /* once it is done */
    uint64_t started_us;
    uint64_t deadline_us; /* UINT64_MAX: none */
    uint64_t timeout_us;
    uint32_t sequence;  /* names the operation in packets */
    uint32_t host_base; /* host counters at its start */
    uint32_t host_gate; /* every local rank's counter must have come this far first: see lane.c */
    uint32_t host_parity;
    struct cl_ticket ticket; /* point-to-point: the other rank and the name of its messages */
    uint16_t pair[2];        /* point-to-point: peer ids of ranks 0, this one, and 1, the other, of its plan */
    enum { CL_UNNAMED, CL_WAITING, CL_NAMED } name; /* point-to-point, core */
    uint64_t call;                                  /* what the group has called, up to this one: equal on all ranks */
    uint64_t host_call;                             /* as others of this host see it: see disagrees in lane.c */
    struct cl_executor *executor;                   /* once started */
    struct cl_operation *next;                      /* in the inbox, then in the group */
};

/* Another rank of this host, as those see it that wait for it. */
struct cl_neighbour {
    int32_t pid;                 /* 0: not watched */
    _Atomic uint64_t looked_us;  /* when somebody looked at its process last */
    _Atomic uint64_t stopped_us; /* since when it is known to be stopped (SIGSTOP); 0: it runs */
};

struct cl_group {
    struct cl_engine *engine;
    uint32_t id, rank, size;
    uint16_t *peers;
    _Atomic int32_t status; /* 0, or why it failed */
    _Atomic uint32_t culprit;
    atomic_bool *lost;               /* by group rank: local ranks whose process died */
    bool announced;                  /* peers have been told (core) */
    struct cl_neighbour *neighbours; /* by local index */
    /* host lane */
    struct cl_host *host;
    uint32_t local_count;
    uint32_t *local;      /* local index -> group rank */
    uint32_t self;        /* own local index */
    uint8_t **staging[2]; /* by parity, by group rank */
    _Atomic uint64_t **calls[2];
    _Atomic uint32_t **counters;
    pthread_mutex_t lane;
    uint32_t host_queued; /* host operations submitted to the engine and not yet done (lane) */
    bool lane_taken;      /* a calling thread runs a host operation (lane) */
    uint32_t sequence, host_sequence, host_base, host_previous_base; /* (lane) */
    uint64_t call;                                                   /* of the latest operation (lane) */
    uint64_t spin_us;
    uint64_t spin_ewma_us;              /* how long recent waits of calling threads took */
    struct cl_operation *first, **last; /* in flight, in order of submission (core) */
    struct cl_mailbox mailbox;          /* (core) */
    struct cl_group *next;              /* (core) */
};

struct watched {
    uint16_t peer;
    int32_t pid;
    bool died; /* and its groups do not know yet */
    int pidfd; /* -1: it is dead */
};

struct cl_link {
    uint32_t number; /* of the wire */
    uint32_t port;
};

struct cl_engine {
    pthread_t thread;
    pthread_mutex_t core, inbox;
    atomic_bool stopping;
    int wake_fd, bell_fd;
    int timer_fd;             /* moves the end of the thread's sleep forward without waking it */
    uint64_t sleeps_until_us; /* (core) */
    char bell[CL_BELL_BYTES];
    struct cl_engine_options options;
    char congestion[16];
    /* network (core) */
    const struct cl_wire_type *wire_type;
    struct cl_wire *wire;
    uint32_t port_count;
    uint32_t interfaces[CL_PORTS_MAX]; /* port -> number of its address: ports of one address share an interface */
    struct cl_endpoint *endpoint;
    uint64_t job;
    uint8_t key[16];
    uint16_t self, epoch;
    struct cl_link **links; /* peer -> path -> link */
    struct cl_datagram *batch;
    size_t batch_first, batch_count; /* what the wire had no room for */
    uint32_t peer_count;
    uint64_t last_heard_us;
    uint64_t readable, ever_readable; /* bit per port: look there in the next turn; what polling has found so far */
    uint64_t arrivals_since_us;       /* how fast packets come: see nap_us in engine.c */
    uint32_t arrivals;
    double arrivals_per_us;
    struct watched watched[CL_WATCHED_MAX];
    uint32_t watched_count;
    struct cl_group *groups;
    /* hand-over (inbox) */
    struct cl_operation *inbox_first, **inbox_last;
    struct cl_events events;
    /* counters (core, or atomic where callers add) */
    _Atomic uint64_t operations_done, operations_failed, wakeups, send_calls, receive_calls;
};

uint64_t cl_now_us(void);
/* Starts the thread, at the end of opening. */
int cl_engine_start(struct cl_engine *engine);
void cl_engine_wake(struct cl_engine *engine);
/* Has what was handed over looked at: by the calling thread, if the engine's sleeps, which saves two thread switches;
 * else by that. */
void cl_engine_attend(struct cl_engine *engine);
/* Drops packets handed out by the endpoint and not yet taken by the wire: they point into buffers about to go. */
void cl_engine_drop_payloads(struct cl_engine *engine);

/* operation.c */
int cl_operation_create(struct cl_group *group, struct cl_plan *plan, void *input, void *output, int dtype, int op,
                        uint32_t priority, uint64_t timeout_us, struct cl_operation **operation);
/* A new operation, not checked: of `kind`, on these bytes. */
int cl_operation_new(struct cl_group *group, enum cl_operation_kind kind, struct cl_plan *plan, void *input,
                     void *output, const struct cl_arithmetic *arithmetic, uint32_t priority, uint64_t timeout_us,
                     struct cl_operation **operation);
/* Lets the operation, not yet handed over, lose packets. CL_EINVAL when it may not. */
int cl_operation_set_qos(struct cl_operation *operation, int dtype, int op, const struct cl_qos *qos);
/* Ends an operation: frees its executor, publishes the status, wakes waiters, sends the event. */
void cl_operation_finish(struct cl_operation *operation, int status);
/* Creates the executor; the group's order (sequence, host_*) must have been assigned. */
int cl_operation_start(struct cl_operation *operation);

/* p2p.c, under core. Both name the messages of an operation, which must be posted before the next call. */
/* CL_OK: it has a name, perhaps from before. CL_EAGAIN: it waits for a message to come, and cl_p2p_next will return it.
 * CL_EPEERLOST: none will come. */
int cl_p2p_bind(struct cl_operation *operation, uint64_t now_us);
/* An operation that has waited and need not any more; NULL: there is none. */
struct cl_operation *cl_p2p_next(struct cl_group *group);

/* group.c */
/* Hands an operation over to the engine; its place in the order of submission is that in which it comes here. `now`:
 * the calling thread may do what there is to do at once. */
void cl_group_submit(struct cl_group *group, struct cl_operation *operation, bool now);
/* the rest under core, by the engine thread */
/* Runs what can run; returns whether there is more to do at once. *deadline_us is lowered to the next one. */
bool cl_group_progress(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us);
/* Notes that the process of a local peer died. */
void cl_group_peer_died(struct cl_group *group, uint16_t peer);
/* Marks the group failed; the first reason stays. Any thread. */
void cl_group_fail(struct cl_group *group, int reason, uint32_t culprit);
/* Notes that another rank has failed the group. */
void cl_group_hear(struct cl_group *group, int reason, uint32_t culprit);
/* The group rank of a peer; UINT32_MAX when it is no member. */
uint32_t cl_group_rank_of(const struct cl_group *group, uint16_t peer);

/* lane.c */
/* Maps the memory that the ranks of this host share. */
int cl_host_queue_open(struct cl_group *group, const struct cl_group_options *options);
/* Under lane: takes the lane for the calling thread if the operation may run there at once; it comes next in the order
 * then. */
bool cl_host_queue_enter(struct cl_group *group, const struct cl_operation *operation);
/* The calling thread, in the lane, runs the operation; returns how it ended. */
int cl_host_queue_run(struct cl_group *group, struct cl_operation *operation);
void cl_host_queue_leave(struct cl_group *group);
/* Tells the host's ranks that this one has ended the operation. */
void cl_host_queue_end(struct cl_group *group, const struct cl_operation *operation);
/* Whether all ranks of the host have come far enough for the operation to start; else *behind is one that has not. */
bool cl_host_queue_gate_is_open(const struct cl_group *group, const struct cl_operation *operation, uint32_t *behind);
/* the rest under core, by the engine thread */
/* Whether the operation may run now: if it touches the host's memory, first in the lane, the lane free, and the gate
 * open. *host_before: one before it did, or this one does. */
bool cl_host_queue_may_start(struct cl_group *group, const struct cl_operation *operation, bool *host_before);
/* Looks whether a blocked operation waits for a rank that is gone, or for a group that failed: what it must be failed
 * with, or CL_OK. */
int cl_host_queue_check(struct cl_group *group, struct cl_operation *operation, uint64_t now_us);
/* Asks for bells for whatever the group's operations wait for, and lowers *deadline_us in case one is lost; false when
 * something moved meanwhile. */
bool cl_host_queue_arm_bells(struct cl_group *group, uint64_t now_us, uint64_t *deadline_us);

#endif
