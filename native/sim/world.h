/*
 * World: the state of one run of a scenario: ranks, the network between them, faults, counts, and the first broken
 * invariant.
 */
#ifndef CL_SIM_WORLD_H
#define CL_SIM_WORLD_H

#include "sim/host.h"
#include "sim/scarcity.h"
#include "sim/scenario.h"

struct sim_operation;
struct sim_rank;
struct sim_world;

/* The invariants that ranks have looked at while they run: see check.h. */
struct sim_checks {
    /* An operation ended: its result is right, or the story allows its error. The caller overwrites its buffers at
     * once, so that a later read or write by the engine shows. */
    void (*ended)(struct sim_world *world, struct sim_operation *operation);
    /* The endpoint took a peer for lost: the peer is dead or unreachable. */
    void (*lost)(struct sim_world *world, const struct sim_rank *rank, uint16_t peer);
    /* The endpoint filled the rank's batch; `classes` of its queue had something to send before, and the last `taken`
     * packets are the queue's. No class starves. */
    void (*batch)(struct sim_world *world, struct sim_rank *rank, uint16_t classes, uint32_t taken);
    /* A datagram leaves. Data takes a paused path only while no other one lives. */
    void (*path)(struct sim_world *world, struct sim_rank *rank, const struct cl_datagram *datagram);
    /* A turn ended: memory and data in flight are bounded. */
    void (*turn)(struct sim_world *world, struct sim_rank *rank);
};

/* What one end says of the incarnation of its peer. */
struct sim_incarnation {
    uint32_t number;
    bool lives;
};

struct sim_world_group {
    struct sim_host *hosts; /* by place: the hosts that have members */
    uint32_t host_count;
    uint32_t *place_of; /* by group rank: its host's place */
    /* of its opening */
    uint32_t come, opened;                /* ranks so far */
    struct sim_incarnation *incarnations; /* [rank * size + peer], as published; NULL: nobody has come */
};

/* The data of one call, for all ranks. */
struct sim_work {
    uint8_t **inputs; /* by group rank: at the time of the call */
    uint8_t *reduced; /* over all ranks; made when first asked for */
    uint8_t *replica; /* likewise, of a call with lossy codecs: the first result; others have the same bits */
};

struct sim_world_fault {
    struct sim_event event;
    struct sim_world *world;
    const struct sim_fault *fault;
    bool begun;
};

struct sim_world_counts {
    uint64_t operations_ok, messages_ok, operations_failed, faults[SIM_FAULTS], attacks, turns;
    uint64_t most_unexpected_bytes, most_flight_bytes;
    uint64_t lost_bytes;                   /* contributions not counted, within their bounds */
    uint64_t openings, closings, revivals; /* in mid-run, by rank */
    uint64_t lossy, nan;                   /* results of calls with lossy codecs, with NaN */
    uint64_t failed_allocations;
    uint64_t any_source, many_groups, many_calls; /* worlds */
};

struct sim_world {
    const struct sim_scenario *scenario;
    struct sim_plans *plans;
    const struct sim_checks *checks;
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_network network;
    struct sim_random random; /* of scheduling */
    struct sim_rank *ranks;
    struct sim_world_group *groups;
    struct sim_work *work; /* by call */
    struct sim_scarcity scarcity;
    struct sim_world_fault faults[SIM_FAULTS_MAX];
    uint16_t deaths[SIM_FAULTS_MAX]; /* dead ranks, in order */
    uint32_t death_count;
    uint64_t last_words_ns;      /* when the last packet of a dead rank came: it may have waited in a long queue */
    bool calm;                   /* without the faults that are scheduled, and nobody late */
    uint64_t start_ns, ended_ns; /* when the last operation ended, from the start */
    uint32_t unfinished;         /* operations of live ranks, called or not */
    struct sim_world_counts counts;
    char failure[512]; /* the first broken invariant; empty: none */
};

/* An invariant broke; only the first one counts. */
__attribute__((format(printf, 2, 3))) void sim_world_fail(struct sim_world *world, const char *format, ...);

/* The time since the start. */
static inline uint64_t sim_world_now_ns(const struct sim_world *world)
{
    return world->clock.now_ns - world->start_ns;
}

#endif
