/*
 * Scarcity: allocations of the engine that fail. The simulator and the C tests are linked so that malloc, calloc and
 * realloc ask here first (`--wrap`); the memory of memory.h does not come from these.
 */
#ifndef CL_SIM_SCARCITY_H
#define CL_SIM_SCARCITY_H

#include "sim/random.h"

struct sim_scarcity {
    struct sim_random random;
    double share;    /* of the allocations */
    uint64_t failed; /* so far */
};

/* From now on this share of the allocations fails; 0: none. */
void sim_scarcity_set(struct sim_scarcity *scarcity, double share);

#endif
