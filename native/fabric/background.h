/*
 * Background: traffic beside the job's: flows from the fabric's other hosts (storage, say) to the job's hosts, at
 * random times and of random sizes. Sizes follow web search (Alizadeh et al., "Data Center TCP", as later simulations
 * round the distribution). Each flow has a connection of its own.
 */
#pragma once

#include "fabric/dctcp.h"

struct sim_background_flow {
    struct sim_background *background;
    uint64_t bytes, started_ns, ended_ns; /* 0: not yet */
    struct sim_background_flow *before;
};

struct sim_background {
    struct sim_event event; /* the next flow */
    struct sim_clock *clock;
    struct sim_dctcp *dctcp;
    struct sim_random random;
    double interval_ns; /* between flows, on average */
    uint32_t count;
    struct sim_background_flow *last;
};

/* load: average share of every link to a host of the job; 0: no background. */
void sim_background_init(struct sim_background *background, struct sim_dctcp *dctcp, double load, uint64_t seed,
                         uint64_t start_ns);
void sim_background_free(struct sim_background *background);

/* A random size, and the mean of all sizes. */
uint64_t sim_background_draw(struct sim_random *random);
double sim_background_mean_bytes(void);
