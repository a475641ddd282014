/*
 * Noise: what a link does to single packets besides carrying them: loss (independent, or in bursts after Gilbert, 1960,
 * and Elliott, 1963), reordering, duplication and flipped bits.
 */
#ifndef CL_SIM_NOISE_H
#define CL_SIM_NOISE_H

#include <stdbool.h>
#include <stdint.h>

#include "sim/random.h"

struct sim_noise {
    double loss;                   /* share of packets lost, one by one */
    double burst_begin, burst_end; /* per packet: chance that a burst of losses begins, and that it ends */
    double burst_loss;             /* share lost in a burst */
    double reorder;                /* share that is late by up to reorder_ns */
    uint64_t reorder_ns;
    double duplicate, corrupt;
    double storm_loss; /* for the time of a storm: see fault.h */
    bool in_burst;
};

/* Whether a packet gets lost. */
bool sim_noise_loses(struct sim_noise *noise, struct sim_random *random);

/* Flips bits of a packet that the receiver can notice: see noise.c. */
void sim_noise_flip(struct sim_random *random, uint8_t *bytes, uint32_t length);

#endif
