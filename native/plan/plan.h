/*
 * Plan: the checked copy of a plan that Python built, immutable except for its deadline. Reference counted, shared by
 * all operations that run it.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "commlayer.h"
#include "kernels/codec.h"
#include "plan/deadline.h"

/* A plan may skip values of its host counter, as ranks with less work than others do at their end. But there is a
 * limit, as counters of successive operations are compared modulo 2^32. */
#define CL_POSTS_LIMIT (1u << 20)

struct cl_plan {
    atomic_uint references;
    uint32_t rank, world_size;
    uint32_t step_count;
    uint32_t network_steps; /* SEND and RECV; 0: no packet is needed */
    uint64_t sent_bytes;    /* to other ranks, in packets */
    uint32_t posts;         /* by how much the plan raises this rank's host counter */
    uint64_t shared_bytes;  /* read from the staging of other ranks */
    bool uses_host;         /* it reads or writes staging, posts or awaits */
    bool encodes;           /* it has steps with a codec */
    bool mutual;            /* it has network steps, and receives from every rank to which it sends */
    uint64_t output_bytes;  /* up to the last one that a step writes */
    uint64_t scratch_bytes;
    uint64_t staging_bytes;
    uint32_t signature; /* of the collective, the same on all ranks; 0: not compared */
    struct cl_step *steps;
    uint32_t *successors;
    uint32_t *roots; /* steps without dependencies, in order */
    uint32_t root_count;
    uint32_t *host_ranks; /* ranks whose staging or counter it uses: they must be on this host */
    uint32_t host_rank_count;
    struct cl_deadline deadline; /* of its partial operations; belongs to the engine thread that runs them */
};

/* Whether steps of this kind read `source` / write `target`. */
bool cl_step_reads(uint32_t kind);
bool cl_step_writes(uint32_t kind);

/* The codec of a step of a checked plan; NULL: none. */
static inline const struct cl_codec *cl_step_codec(const struct cl_step *step)
{
    return step->flags >> 8 ? cl_codec_of((enum cl_codec_kind)((step->flags >> 8) - 1)) : NULL;
}

void cl_plan_retain(struct cl_plan *plan);
