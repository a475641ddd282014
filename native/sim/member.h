/*
 * Member: one rank's part of one group, and its operations: the thin equivalent of native/group.c and lane.c.
 * Operations that need packets run any number at a time, those that touch the host's memory one after another; the
 * first error fails the group, and the others are told.
 */
#ifndef CL_SIM_MEMBER_H
#define CL_SIM_MEMBER_H

#include "plan/executor.h"
#include "sim/host.h"

struct sim_rank;

enum sim_state { SIM_UNCALLED, SIM_IN_FLIGHT, SIM_ENDED };

/* One rank's part of one call. */
struct sim_operation {
    struct sim_member *member;
    uint32_t call;
    uint32_t shape;
    cl_plan *plan;
    enum sim_state state;
    bool awaited; /* the world does not end before it */
    int status;   /* once it ended */
    uint64_t called_ns, ended_ns;
    uint8_t *input, *output; /* the same for collectives in place */
    uint64_t input_bytes, output_bytes;
    struct cl_arithmetic arithmetic;
    uint64_t deadline_us;
    uint32_t sequence, host_base, host_gate, host_parity;
    uint64_t signature, host_call; /* what was called so far; the same for operations in the host's memory */
    struct cl_executor *executor;
    struct cl_missing missing; /* with a bound, once it ended well: see account.h */
    uint8_t *result;           /* likewise: its output */
    struct sim_operation *next;
};

struct sim_member {
    struct sim_rank *rank;
    uint32_t group, self, size; /* index of the group, and place in it */
    const uint16_t *peers;
    int status;       /* 0, or why the group failed */
    uint16_t culprit; /* UINT16_MAX: not known */
    uint64_t failed_ns;
    bool announced;
    bool *lost; /* by group rank: ranks of this host that died */
    struct sim_host *host;
    uint32_t index; /* own place in the host */
    uint8_t **staging[2];
    _Atomic uint32_t **counters;
    _Atomic uint64_t **calls[2];
    uint64_t signature;
    uint32_t sequence, host_sequence, host_base, host_previous_base;
    struct sim_operation *first, **last;
};

void sim_member_init(struct sim_member *member, struct sim_rank *rank, uint32_t group);
void sim_member_free(struct sim_member *member);

/* Takes a call that was made just now. */
void sim_member_submit(struct sim_member *member, struct sim_operation *operation);
/* Marks the group failed; the first reason stays. */
void sim_member_fail(struct sim_member *member, int reason, uint16_t culprit);
/* Runs what can run. Returns whether there is more to do at once; lowers *deadline_us. */
bool sim_member_progress(struct sim_member *member, uint64_t now_us, uint64_t *deadline_us);

#endif
