/*
 * Caller: the program of a rank, which makes its calls one after the other, each when its time has come, and hears of
 * their ends.
 */
#ifndef CL_SIM_CALLER_H
#define CL_SIM_CALLER_H

#include "sim/rank.h"

/* Joins the groups that are there from the start, and begins. */
void sim_caller_init(struct sim_rank *rank);

#endif
