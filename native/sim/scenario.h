/*
 * Scenario: all that a seed decides before the run: ranks, network, calls with their times, faults. Only the noise of
 * single packets is drawn later.
 *
 * The story decides the allowed outcomes. In the first stories every operation must succeed. In the others live ranks
 * must get the right result or a typed error, in time.
 */
#ifndef CL_SIM_SCENARIO_H
#define CL_SIM_SCENARIO_H

#include "sim/call.h"
#include "sim/network.h"
#include "sim/plans.h"
#include "sim/wiring.h"

enum sim_story {
    SIM_STORY_NOISE,     /* any mix of faults that must cost nothing but time */
    SIM_STORY_PATH,      /* one of several paths dies, on a clean network: compared with a run without the fault */
    SIM_STORY_LATE,      /* a rank calls late, and early packets for it find no room: compared in the same way */
    SIM_STORY_LARGE,     /* many ranks, little noise */
    SIM_STORY_DEATH,     /* a rank dies */
    SIM_STORY_FROZEN,    /* a rank stops for longer than the peer timeout, and goes on */
    SIM_STORY_PARTITION, /* two hosts do not reach each other any more, in one direction or both */
    SIM_STORY_ABSENT,    /* a rank never calls an operation */
    SIM_STORY_MISMATCH,  /* a rank calls another operation than the others */
    SIM_STORY_ABORT,     /* a rank aborts its group */
    SIM_STORY_CLOSE,     /* a rank closes its group while the others go on */
    SIM_STORY_SCARCE,    /* a rank has no memory for a while */
    SIM_STORIES,
};
const char *sim_story_name(enum sim_story story);
static inline bool sim_story_must_succeed(enum sim_story story)
{
    return story <= SIM_STORY_LARGE;
}
/* Stories with one fault on a clean network, whose cost is measured. */
static inline bool sim_story_is_compared(enum sim_story story)
{
    return story == SIM_STORY_PATH || story == SIM_STORY_LATE;
}

enum sim_fault_kind {
    SIM_FAULT_PAUSE,    /* rank `a` does not run */
    SIM_FAULT_DEATH,    /* rank `a` ends */
    SIM_FAULT_DOWN,     /* interface `path` of host `a` carries nothing */
    SIM_FAULT_CUT,      /* nothing gets from host `a` to host `b` on `path` */
    SIM_FAULT_STORM,    /* `amount` of all packets to host `a` get lost on `path` */
    SIM_FAULT_CLOG,     /* interface `path` of host `a` is `amount` times slower */
    SIM_FAULT_ATTACK,   /* rank `a` gets `amount` packets from outside its job */
    SIM_FAULT_LATE,     /* rank `a` makes call `b` that much later */
    SIM_FAULT_ABSENT,   /* rank `a` never makes call `b` or any later one */
    SIM_FAULT_MISMATCH, /* rank `a` makes call `b` with another shape, or length: `amount`; collectives: in class `path`
                         */
    SIM_FAULT_ABORT,    /* rank `a` aborts group `b` */
    SIM_FAULT_HOLE,     /* interface `path` of host `a` swallows datagrams longer than `amount`, as an MTU black hole */
    SIM_FAULT_DETOUR,   /* rank `a` pauses `path` to all its peers */
    SIM_FAULT_CLOSE,    /* rank `a` closes group `b` */
    SIM_FAULT_SCARCE,   /* `amount` of rank `a`'s allocations fail */
    SIM_FAULTS,
};
const char *sim_fault_name(enum sim_fault_kind kind);

struct sim_fault {
    enum sim_fault_kind kind;
    uint64_t at_ns, for_ns; /* from the start; 0: for ever, or at once */
    uint32_t a, b, path;
    double amount;
};

enum { SIM_FAULTS_MAX = 48, SIM_GROUPS_MANY = 100, SIM_CALLS_MANY = 20000 };

struct sim_group {
    uint32_t layout, size;
    uint16_t *members;      /* group rank -> rank */
    uint64_t staging_bytes; /* enough for every call */
    uint8_t classes;        /* a bit for each class of the collectives */
    bool opens;             /* with its first call; else at the start */
    bool closes;            /* on each rank, after its last call there */
    bool revives;           /* its ranks meet again, after some of them lost each other: all its calls succeed */
    uint32_t first, last;   /* its calls */
};

/* How fast a rank is. */
struct sim_speed {
    uint64_t turn_ns, packet_ns; /* costs of a turn of its engine */
    uint64_t wake_ns;            /* most time from an event to the turn */
    int64_t drift_ppm;           /* of its clock */
    uint64_t clock_us;           /* its clock at the start */
};

struct sim_scenario {
    uint64_t seed;
    enum sim_story story;
    uint32_t layout, world, hosts;
    const uint32_t *host_of;

    /* network */
    uint32_t paths;
    bool trunks;
    const struct sim_queue_type *queue;
    double rates_bps[SIM_PATHS_MAX]; /* per path; hosts[i] of them differ by host_rate[i] */
    double *host_rate;
    uint64_t delays_ns[SIM_PATHS_MAX], jitter_ns;
    uint32_t queue_packets;
    struct sim_noise noise;
    uint32_t noisy_host; /* it alone has the noise; UINT32_MAX: all have it */
    double full_chance;  /* how often a wire takes only part of a batch */
    uint64_t socket_bytes;

    /* endpoints */
    enum cl_auth auth;
    uint32_t datagram_bytes; /* the largest of all ranks */
    struct sim_wiring wiring;
    const char *rate_control; /* not drawn; NULL: the product's */
    uint64_t peer_timeout_us, unexpected_limit_bytes;
    struct sim_speed *speeds; /* by rank */

    /* work */
    uint32_t group_count, call_count, call_capacity;
    struct sim_group *groups;
    struct sim_call *calls;
    uint32_t depth;  /* calls in flight per rank */
    bool any_source; /* some receive takes the message of any rank, while ranks fail */
    bool deserted;   /* ... in a group of which nobody but a rank that dies could send */
    uint64_t skew_ns, timeout_us;
    uint64_t payload_bytes; /* of all calls and ranks together */

    uint32_t fault_count;
    struct sim_fault faults[SIM_FAULTS_MAX];
    uint64_t settled_ns; /* nothing goes wrong after that */
    uint64_t limit_ns;   /* by then everything must have ended */
};

void sim_scenario_free(struct sim_scenario *scenario);

#endif
