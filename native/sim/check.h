/*
 * Check: the invariants. Each function looks at one moment, and reports to sim_world_fail.
 */
#ifndef CL_SIM_CHECK_H
#define CL_SIM_CHECK_H

#include "sim/rank.h"
#include "sim/world.h"

extern const struct sim_checks sim_checks;
/* Gives a rank one packet of an attacker: it causes no answer, no memory and no timer, only a count. */
void sim_check_attack(struct sim_world *world, struct sim_rank *rank);
/* The world ended: everything is done, in time, and nothing is left behind. */
void sim_check_end(struct sim_world *world);

#endif
