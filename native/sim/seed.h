/*
 * Seed: the number that decides a scenario.
 */
#ifndef CL_SIM_SEED_H
#define CL_SIM_SEED_H

#include "sim/scenario.h"

void sim_seed_draw(struct sim_scenario *scenario, const struct sim_plans *plans, uint64_t seed);

#endif
