/*
 * Check: the invariants. Each function looks at one moment, and reports to sim_world_fail.
 */
#ifndef CL_SIM_CHECK_H
#define CL_SIM_CHECK_H

#include "sim/world.h"

/* What a rank contributes to a call. */
int64_t sim_check_value(const struct sim_world *world, uint32_t call, uint32_t rank, uint64_t index);
/* Fills a rank's buffers for a call. */
void sim_check_prepare(struct sim_world *world, struct sim_operation *operation);
/* The same for a message: a rank's part of it has `length` bytes. */
void sim_check_prepare_message(struct sim_world *world, struct sim_operation *operation, uint32_t length);
/* An operation ended: its result is right, or the story allows its error. The caller overwrites its buffers at once, so
 * that a later read or write by the engine shows. */
void sim_check_ended(struct sim_world *world, struct sim_operation *operation);
/* The endpoint took a peer for lost: the peer is dead or unreachable. */
void sim_check_lost(struct sim_world *world, const struct sim_rank *rank, uint16_t peer);
/* The endpoint filled the rank's batch; `classes` of its queue had something to send before, and the last `taken`
 * packets are the queue's. No class starves. */
void sim_check_batch(struct sim_world *world, struct sim_rank *rank, uint8_t classes, uint32_t taken);
/* A turn ended: memory and data in flight are bounded. */
void sim_check_turn(struct sim_world *world, struct sim_rank *rank);
/* Gives a rank one packet of an attacker: it causes no answer, no memory and no timer, only a count. */
void sim_check_attack(struct sim_world *world, struct sim_rank *rank);
/* The world ended: everything is done, in time, and nothing is left behind. */
void sim_check_end(struct sim_world *world);

#endif
