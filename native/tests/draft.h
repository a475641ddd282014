/*
 * Draft: plans written by hand in tests. Steps are added in any order, with the steps they wait for; the counts and
 * the successor array follow from that.
 */
#pragma once

#include <stddef.h>

#include "commlayer.h"
#include "tests/check.h"

enum { DRAFT_STEPS = 64, DRAFT_EDGES = 256, DRAFT_NONE = UINT32_MAX };

struct draft {
    uint32_t rank, world_size;
    uint64_t input_bytes, output_bytes, scratch_bytes, staging_bytes;
    uint32_t step_count, edge_count;
    struct cl_step steps[DRAFT_STEPS];
    uint32_t from[DRAFT_EDGES], to[DRAFT_EDGES];
    uint32_t successors[DRAFT_EDGES]; /* filled by draft_lay_out */
};

static inline void draft_order(struct draft *draft, uint32_t before, uint32_t after)
{
    draft->from[draft->edge_count] = before;
    draft->to[draft->edge_count++] = after;
}

/* Adds a step that waits for `after` (DRAFT_NONE: for nothing); returns its index. */
static inline uint32_t draft_add(struct draft *draft, struct cl_step step, uint32_t after)
{
    draft->steps[draft->step_count] = step;
    if (after != DRAFT_NONE)
        draft_order(draft, after, draft->step_count);
    return draft->step_count++;
}

static inline void draft_lay_out(struct draft *draft)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < draft->step_count; i++) {
        struct cl_step *step = &draft->steps[i];
        step->dependencies = 0;
        step->successor_first = used;
        for (uint32_t e = 0; e < draft->edge_count; e++) {
            if (draft->from[e] == i)
                draft->successors[used++] = draft->to[e];
            step->dependencies += draft->to[e] == i;
        }
        step->successor_count = used - step->successor_first;
    }
}

/* Creates the plan as laid out, with later changes by the test. */
static inline int draft_create(const struct draft *draft, cl_plan **plan)
{
    struct cl_plan_options options = {.steps = draft->steps,
                                      .step_count = draft->step_count,
                                      .successors = draft->successors,
                                      .successor_count = draft->edge_count,
                                      .rank = draft->rank,
                                      .world_size = draft->world_size,
                                      .input_bytes = draft->input_bytes,
                                      .output_bytes = draft->output_bytes,
                                      .scratch_bytes = draft->scratch_bytes,
                                      .staging_bytes = draft->staging_bytes};
    return cl_plan_create(&options, plan);
}

static inline cl_plan *draft_finish(struct draft *draft)
{
    cl_plan *plan = NULL;
    draft_lay_out(draft);
    return draft_create(draft, &plan) == CL_OK ? plan : NULL;
}

static inline void plan_leave(cl_plan *const *plan)
{
    cl_plan_release(*plan);
}

#define SCOPED_PLAN SCOPED(plan_leave) cl_plan

/* Each rank sends all of its input to each other rank, and sums: output = the sum of the inputs. */
static inline cl_plan *draft_exchange(uint32_t rank, uint32_t world_size, uint64_t bytes)
{
    struct draft draft = {.rank = rank, .world_size = world_size, .input_bytes = bytes, .output_bytes = bytes};
    uint32_t own = draft_add(
        &draft, (struct cl_step){.kind = CL_COPY, .peer = rank, .target = CL_OUTPUT, .length = bytes}, DRAFT_NONE);
    for (uint32_t peer = 0; peer < world_size; peer++) {
        if (peer == rank)
            continue;
        draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = peer, .length = bytes}, DRAFT_NONE);
        draft_add(&draft, (struct cl_step){.kind = CL_RECV_REDUCE, .peer = peer, .target = CL_OUTPUT, .length = bytes},
                  own);
    }
    return draft_finish(&draft);
}

/* The same within a host: each rank stages its input, and adds the inputs staged by the others. */
static inline cl_plan *draft_host_exchange(uint32_t rank, uint32_t world_size, uint64_t bytes, uint64_t staging_bytes)
{
    struct draft draft = {.rank = rank,
                          .world_size = world_size,
                          .input_bytes = bytes,
                          .output_bytes = bytes,
                          .staging_bytes = staging_bytes};
    uint32_t staged = draft_add(
        &draft, (struct cl_step){.kind = CL_COPY, .peer = rank, .target = CL_STAGING, .length = bytes}, DRAFT_NONE);
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, staged);
    last =
        draft_add(&draft, (struct cl_step){.kind = CL_COPY, .peer = rank, .target = CL_OUTPUT, .length = bytes}, last);
    for (uint32_t peer = 0; peer < world_size; peer++) {
        if (peer == rank)
            continue;
        last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = peer, .message = 1}, last);
        last =
            draft_add(&draft,
                      (struct cl_step){
                          .kind = CL_REDUCE, .peer = peer, .source = CL_STAGING, .target = CL_OUTPUT, .length = bytes},
                      last);
    }
    return draft_finish(&draft);
}
