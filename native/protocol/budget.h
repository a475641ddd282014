/*
 * Budget: how many bytes may be on their way to this process as it granted them (credit.h).
 *
 * The number is given, or derived: 1.5 times what the interfaces carry between a grant and the packets that it allows
 * (after SIRD: Prasopoulos et al., NSDI 2025). That is a round trip without queues, and the time in which both hosts
 * answer: a millisecond or more where engines sleep.
 *
 * The processes of a host that share an interface have one budget together. Each tells the others how much it is owed.
 * A process may always use an equal part of the budget, and more if the others leave it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "congestion/congestion.h"

struct cl_budget {
    uint64_t bytes; /* for all processes of the host; 0: this process grants no credit */
    bool derived;
    double round_us;       /* from a grant to its packets, the mean of all peers; 0: not measured */
    uint64_t others_bytes; /* what the others were owed when they were last heard */
    uint32_t others;       /* how many were owed something */
    uint32_t heard;        /* entries of `owed` since then */
    uint64_t owed[CL_NEIGHBOURS_MAX];
};

/* bytes: given; 0: no credit; CL_CREDIT_DERIVED: derived. */
void cl_budget_init(struct cl_budget *budget, uint64_t bytes);
/* One measurement: the interfaces carry `capacity` bytes per second (0: not known); one round took round_us. */
void cl_budget_measure(struct cl_budget *budget, double capacity, double round_us);

/* A neighbour (0 to CL_NEIGHBOURS_MAX - 1) tells what it is owed, through each interface the same. */
void cl_budget_hear(struct cl_budget *budget, uint32_t neighbour, uint64_t owed_bytes);
/* All have been heard. Those that were not are gone, and owed nothing. */
void cl_budget_heard(struct cl_budget *budget);

/* The bytes that this process may be owed. */
uint64_t cl_budget_share(const struct cl_budget *budget);
