/*
 * Plans: the production plans, made by commlayer/plans in Python (native/sim/plans.py) and mapped from one file.
 *
 * A shape is one collective in one layout of ranks over hosts, with its sizes and settings. It has a plan per rank, and
 * says what the collective means as clauses: this range of a rank's OUTPUT is that range of one rank's INPUT, or its
 * reduction over all ranks. So results are checked against the meaning, not against the algorithm.
 */
#ifndef CL_SIM_PLANS_H
#define CL_SIM_PLANS_H

#include <stdbool.h>

#include "commlayer.h"

enum { SIM_PLANS_VERSION = 5, SIM_NAME_BYTES = 24, SIM_ALL_RANKS = UINT32_MAX };

/* How messages are encoded: in 16 bits, which hold the simulator's small numbers exactly; in 8; or some in 4. */
enum sim_encoding { SIM_ENCODED_NOT, SIM_ENCODED_16, SIM_ENCODED_8, SIM_ENCODED_4 };

/* The records of the file, little-endian; `*_at` are offsets from its start. */
struct sim_plans_head {
    char magic[8];
    uint32_t version, layout_count, shape_count, unused;
    uint64_t layouts_at, shapes_at;
};

struct sim_layout {
    uint32_t world, hosts;
    uint64_t hosts_at;               /* a uint32_t per rank: its host */
    uint32_t shape_first, shape_end; /* shapes of this layout */
};

struct sim_shape {
    char collective[SIM_NAME_BYTES];
    uint32_t layout, world, itemsize, average, root, deterministic;
    char algorithm[8];
    uint64_t numel;
    uint64_t input_bytes, output_bytes; /* per rank, the largest of all ranks */
    uint32_t in_place;                  /* INPUT and OUTPUT are the same memory */
    uint32_t encoded;                   /* enum sim_encoding of its messages; of sums of CL_F32 */
    double loss_bound;                  /* share of the contributions that may be lost */
    uint64_t parts_at;                  /* a struct sim_part per rank */
};

struct sim_part {
    uint64_t steps_at, successors_at, clauses_at;
    uint32_t step_count, successor_count, clause_count, unused;
    uint64_t scratch_bytes, staging_bytes;
};

struct sim_clause {
    uint64_t target, source, length; /* bytes of OUTPUT, bytes of INPUT */
    uint32_t rank;                   /* whose INPUT; SIM_ALL_RANKS: the reduction over all */
    uint32_t unused;
};

struct sim_plans {
    const uint8_t *bytes;
    size_t length;
    const struct sim_plans_head *head;
    const struct sim_layout *layouts;
    const struct sim_shape *shapes;
    cl_plan ***loaded; /* by shape, then by rank; made when first used */
};

/* Returns NULL, or the problem with the file. */
const char *sim_plans_open(struct sim_plans *plans, const char *path);
void sim_plans_close(struct sim_plans *plans);

static inline const uint32_t *sim_plans_hosts(const struct sim_plans *plans, const struct sim_layout *layout)
{
    return (const uint32_t *)(const void *)(plans->bytes + layout->hosts_at);
}
static inline const struct sim_part *sim_plans_part(const struct sim_plans *plans, const struct sim_shape *shape,
                                                    uint32_t rank)
{
    return (const struct sim_part *)(const void *)(plans->bytes + shape->parts_at) + rank;
}
static inline const struct sim_clause *sim_plans_clauses(const struct sim_plans *plans, const struct sim_part *part)
{
    return (const struct sim_clause *)(const void *)(plans->bytes + part->clauses_at);
}
static inline const struct cl_step *sim_plans_steps(const struct sim_plans *plans, const struct sim_part *part)
{
    return (const struct cl_step *)(const void *)(plans->bytes + part->steps_at);
}

/* Bytes and messages sent by the plans of all ranks. */
uint64_t sim_plans_payload(const struct sim_plans *plans, const struct sim_shape *shape, uint64_t *messages);

/* The plan of a rank; NULL when cl_plan_create refuses it. */
cl_plan *sim_plans_load(struct sim_plans *plans, uint32_t shape, uint32_t rank);

#endif
