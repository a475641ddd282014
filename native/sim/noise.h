/*
 * Noise: faults of a link that hit single packets: loss (independent, or in bursts after Gilbert, 1960, and Elliott,
 * 1963), reordering, duplication and flipped bits. The length of a burst is a time, not a number of packets: the few
 * probes of an idle path would stay in a burst for minutes.
 */
#ifndef CL_SIM_NOISE_H
#define CL_SIM_NOISE_H

#include <stdbool.h>
#include <stdint.h>

#include "sim/random.h"

struct sim_noise {
    double loss;        /* share of packets, lost independently */
    double burst_begin; /* per packet: chance that a burst of losses begins */
    uint64_t burst_ns;  /* longest burst */
    double burst_loss;  /* share lost in a burst */
    double reorder;     /* share of packets, late by up to reorder_ns */
    uint64_t reorder_ns;
    double duplicate, corrupt;
    bool corrupt_payload; /* flipped bits may be in the payload, too */
    double storm_loss;    /* during a storm: see scenario.h */
    uint64_t burst_until_ns;
};

/* Whether a packet gets lost. */
bool sim_noise_loses(struct sim_noise *noise, struct sim_random *random, uint64_t now_ns);

/* Flips a bit that the receiver must notice. */
void sim_noise_flip(const struct sim_noise *noise, struct sim_random *random, uint8_t *bytes, uint32_t length);

#endif
