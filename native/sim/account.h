/*
 * Account: calls that may lose contributions. The contributions reported lost must be within the loss bound, the same
 * on both sides of every message, and explain the results: each is the sum, once, of all other contributions.
 */
#ifndef CL_SIM_ACCOUNT_H
#define CL_SIM_ACCOUNT_H

#include "sim/world.h"

/* A partial operation succeeded: its losses are within the loss bound; its result is kept until all have ended. */
void sim_account_keep(struct sim_world *world, struct sim_operation *operation);
/* Bytes sent to the operation and not counted. */
uint64_t sim_account_absent(const struct sim_operation *operation);
/* The world ended: the ranks agree on the losses of this call, and have the sums of the rest. */
void sim_account_check(struct sim_world *world, uint32_t call);

#endif
