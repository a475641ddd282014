/*
 * Membership: how a rank comes to its groups and leaves them, at the start or in mid-run.
 *
 * Opening is what the processes do over the Store (commlayer/transport/joining.py): each rank that comes publishes the
 * incarnations of its peers; once all have come, each revives those that were lost and opens its end; once all have
 * opened theirs, they go on.
 */
#ifndef CL_SIM_MEMBERSHIP_H
#define CL_SIM_MEMBERSHIP_H

#include "sim/rank.h"

/* Opens the groups that are there from the start. `ended` and `early` hear of the ends of operations: see group/io.h.
 */
void sim_membership_init(struct sim_rank *rank, void (*ended)(void *member, struct cl_operation *operation, int status),
                         bool (*early)(void *member, struct cl_operation *operation));
/* The rank comes to the opening of a group that it is not in. False: it has to wait. */
bool sim_membership_enter(struct sim_rank *rank, uint32_t group);
/* Closes a group in which the rank has made its last call, if the scenario says so; a little later. */
void sim_membership_tidy(struct sim_rank *rank, uint32_t group);
/* Closes a group that the rank is in, whatever is in flight. */
void sim_membership_close(struct sim_member *member);

#endif
