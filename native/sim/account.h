/*
 * Account: calls that may lose contributions. What the ranks say they did not count must be within the bound, the same
 * on both sides of every message, and explain the results: each is the sum, once, of everything else.
 */
#ifndef CL_SIM_ACCOUNT_H
#define CL_SIM_ACCOUNT_H

#include "sim/world.h"

/* An operation with a bound ended well: what it lost is within that, and its result is kept until all have ended. */
void sim_account_keep(struct sim_world *world, struct sim_operation *operation);
/* Bytes that it was sent and did not count. */
uint64_t sim_account_absent(const struct sim_operation *operation);
/* The world ended: the ranks agree on what this call lost, and have what is left. */
void sim_account_check(struct sim_world *world, uint32_t call);

#endif
