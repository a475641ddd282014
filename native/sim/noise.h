/*
 * Noise: what a link does to single packets besides carrying them: loss (independent, or in bursts after Gilbert, 1960,
 * and Elliott, 1963), reordering, duplication and flipped bits. Bursts last for a time and not for a number of packets:
 * the few probes of an idle path would stay in one for minutes.
 */
#ifndef CL_SIM_NOISE_H
#define CL_SIM_NOISE_H

#include <stdbool.h>
#include <stdint.h>

#include "sim/random.h"

struct sim_noise {
    double loss;        /* share of packets lost, one by one */
    double burst_begin; /* per packet: chance that a burst of losses begins */
    uint64_t burst_ns;  /* longest burst */
    double burst_loss;  /* share lost in a burst */
    double reorder;     /* share that is late by up to reorder_ns */
    uint64_t reorder_ns;
    double duplicate, corrupt;
    bool corrupt_payload; /* flipped bits may be in the payload, too */
    double storm_loss;    /* for the time of a storm: see fault.h */
    uint64_t burst_until_ns;
};

/* Whether a packet gets lost. */
bool sim_noise_loses(struct sim_noise *noise, struct sim_random *random, uint64_t now_ns);

/* Flips a bit that the receiver must notice. */
void sim_noise_flip(const struct sim_noise *noise, struct sim_random *random, uint8_t *bytes, uint32_t length);

#endif
