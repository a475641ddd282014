/*
 * Summary: counts over many runs.
 */
#ifndef CL_SIM_SUMMARY_H
#define CL_SIM_SUMMARY_H

#include "sim/world.h"

enum { SIM_SLOWEST = 5 };

struct sim_cost {
    uint64_t seed, events;
};

struct sim_summary {
    uint64_t seeds, failures, events;
    uint64_t stories[SIM_STORIES];
    uint64_t virtual_us;
    struct sim_world_counts counts;
    struct sim_medium_counts network;
    struct sim_cost slowest[SIM_SLOWEST]; /* the most expensive first */
};

void sim_summary_add(struct sim_summary *summary, const struct sim_world *world);
void sim_summary_merge(struct sim_summary *summary, const struct sim_summary *other);
void sim_summary_print(const struct sim_summary *summary, FILE *file);

#endif
