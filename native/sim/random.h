/*
 * Random: the only source of chance in the simulator (SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom
 * number generators", 2014). One seed has several streams, so that the draws of one part of a world do not change those
 * of the others.
 */
#ifndef CL_SIM_RANDOM_H
#define CL_SIM_RANDOM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

struct sim_random {
    uint64_t state;
};

static inline uint64_t sim_mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

static inline struct sim_random sim_random_seeded(uint64_t seed, uint32_t stream)
{
    return (struct sim_random){sim_mix(seed + 0x9E3779B97F4A7C15u) ^ sim_mix(~(uint64_t)stream)};
}

static inline uint64_t sim_random_next(struct sim_random *random)
{
    return sim_mix(random->state += 0x9E3779B97F4A7C15u);
}

/* 0 .. bound - 1 */
static inline uint64_t sim_random_below(struct sim_random *random, uint64_t bound)
{
    return bound ? sim_random_next(random) % bound : 0;
}

/* least .. most, both included */
static inline uint64_t sim_random_between(struct sim_random *random, uint64_t least, uint64_t most)
{
    return least + sim_random_below(random, most - least + 1);
}

/* [0, 1) */
static inline double sim_random_real(struct sim_random *random)
{
    return (double)(sim_random_next(random) >> 11) / 9007199254740992.0;
}

/* Draws nothing for impossible and certain things. */
static inline bool sim_random_chance(struct sim_random *random, double probability)
{
    return probability > 0 && (probability >= 1 || sim_random_real(random) < probability);
}

/* All orders of magnitude between the two are equally likely. */
static inline double sim_random_scale(struct sim_random *random, double least, double most)
{
    return least * pow(most / least, sim_random_real(random));
}

#endif
