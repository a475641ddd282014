/*
 * Run: the run of a scenario: it makes the world, lets the faults strike at their times, and turns the clock until all
 * operations have ended.
 */
#ifndef CL_SIM_RUN_H
#define CL_SIM_RUN_H

#include "sim/world.h"

/* Runs the scenario to its end or to the first broken invariant. `calm`: without its faults. `trace`: a file for every
 * event, or NULL. */
void sim_run(struct sim_world *world, const struct sim_scenario *scenario, struct sim_plans *plans, bool calm,
             FILE *trace);
void sim_run_free(struct sim_world *world);

#endif
