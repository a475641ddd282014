/*
 * Data: the contributions of ranks to calls, made from the seed, and their reduction.
 */
#ifndef CL_SIM_DATA_H
#define CL_SIM_DATA_H

#include "sim/world.h"

/* Element `index` of a rank's contribution to a collective. */
int64_t sim_data_value(const struct sim_world *world, uint32_t call, uint32_t rank, uint64_t index);
/* Fills a rank's input. */
void sim_data_fill(const struct sim_world *world, uint32_t call, uint32_t rank, uint8_t *input, uint64_t bytes);
/* The reduction over all ranks, element by element; the caller frees it. */
uint8_t *sim_data_reduce(const struct sim_world *world, uint32_t call);
/* Byte `at` of the n-th message of this tag from one rank to another. */
uint8_t sim_data_byte(const struct sim_world *world, const struct sim_call *call, uint32_t from, uint32_t number,
                      uint32_t at);

#endif
