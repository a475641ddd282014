/*
 * Rank: one process: an endpoint, its groups, its clock and its CPU. Like the engine, it takes turns (group/turn.h).
 */
#ifndef CL_SIM_RANK_H
#define CL_SIM_RANK_H

#include "group/nap.h"
#include "group/turn.h"
#include "sim/driver.h"
#include "sim/host.h"
#include "sim/scenario.h"

enum { SIM_BATCH = 64 };

struct sim_world;

enum sim_state { SIM_UNCALLED, SIM_IN_FLIGHT, SIM_ENDED };

/* One rank's part of one call. */
struct sim_operation {
    struct cl_operation operation; /* first: operations of the group are these; made by the call */
    struct sim_member *member;     /* NULL: the rank takes no part */
    uint32_t call;
    uint32_t shape;
    enum sim_state state;
    bool awaited; /* the world waits for its end */
    bool early;   /* an eager send, or a collective that has ended early: the caller does not wait for its end */
    bool trails;  /* it has ended early, and the group goes on with it; the world waits for that */
    int status;   /* after the end */
    struct cl_news_item news, last; /* of its end; after an early one, of the group's */
    uint64_t called_ns, ended_ns;
    uint8_t *input, *output; /* the same for collectives in place */
    uint64_t input_bytes, output_bytes;
    uint8_t *result; /* the output of a partial operation that succeeded; see account.h */
};

struct sim_rank {
    struct sim_driver driver; /* the first member: drivers are cast to ranks */
    struct sim_event due;     /* makes the calls that are due: its program, caller.h */
    struct sim_world *world;
    uint16_t id;
    uint32_t host;
    uint64_t paused_until_ns; /* no call before */
    struct cl_nap nap;
    uint64_t naps_until_ns; /* packets that come before wait until then */
    struct cl_endpoint *endpoint;
    uint16_t *neighbours; /* the other ranks of its host */
    uint32_t neighbour_count;

    bool busy;              /* in the latest turn an operation used up its budget */
    uint32_t spins;         /* turns in a row with nothing to do that want the next one at once */
    uint16_t queue_classes; /* of the endpoint's queue before it filled the batch: classes with something to send */
    uint32_t queue_packets; /* ... and packets taken from the queue so far */
    uint32_t starved;       /* the queue's packets since the last class with anything to send had a turn */

    struct sim_member *members; /* by group */
    struct cl_groups groups;    /* those it is a member of */
    struct cl_operation_list handed_over;
    struct cl_news news;
    uint32_t packets;                 /* in the latest turn, in and out */
    uint32_t deaths;                  /* entries of world.deaths it has seen */
    struct sim_operation *operations; /* by call */
    uint32_t next_call, in_flight;
    uint32_t first_open;     /* all calls before have ended */
    double scarce;           /* share of its allocations that fail */
    uint64_t expected_bytes; /* payload that the successful operations had to receive */
    uint32_t strays;         /* packets of data on a paused path, beside one that is not; since its latest pause */
    uint8_t *specimen;       /* the last received packet: material for forgers */
    uint32_t specimen_length;
};

void sim_rank_init(struct sim_rank *rank, struct sim_world *world, uint16_t id);
void sim_rank_free(struct sim_rank *rank);
/* A datagram has reached the socket. */
void sim_rank_receive(struct sim_rank *rank, struct sim_datagram *datagram);
/* Wakes the engine: the turn comes as soon as the engine gets the CPU. */
void sim_rank_wake(struct sim_rank *rank);
/* Takes the operations that the caller has handed over into their groups. */
void sim_rank_take(struct sim_rank *rank);
/* No part of the rank runs before. */
void sim_rank_pause(struct sim_rank *rank, uint64_t until_ns);
void sim_rank_kill(struct sim_rank *rank);

#endif
