/*
 * Draw: what the files that draw a scenario share.
 */
#ifndef CL_SIM_DRAW_H
#define CL_SIM_DRAW_H

#include "sim/random.h"
#include "sim/scenario.h"

enum {
    MS = 1000000,
    SMALL_WORLD = 8,
    LARGE_WORLD = 64,
    COLLECTIVES_MAX = 64,
    MESSAGES_MAX = 96,
    LATE_MOST_US = 31000000, /* three late calls, one after the other */
};

/* The streams of chance of a seed, so that new draws do not change the old ones. */
enum {
    STREAM_SCENARIO = 0,
    STREAM_MESSAGES = 3,
    STREAM_PATHS = 5,
    STREAM_RELATIVE = 6,
    STREAM_GROUPS = 7,
    STREAM_MANY = 8,
    STREAM_NAN = 9,
    STREAM_SECOND_LIFE = 10,
    STREAM_ANY_SOURCE = 11,
    STREAM_DESERTED = 12,
};

/* The state of drawing, with a stream of chance. */
struct draw {
    struct sim_scenario *scenario;
    const struct sim_plans *plans;
    struct sim_random random;
};

static inline struct draw sim_draw_from(const struct draw *draw, uint32_t stream)
{
    return (struct draw){draw->scenario, draw->plans, sim_random_seeded(draw->scenario->seed, stream)};
}

static inline bool chance(struct draw *draw, double probability)
{
    return sim_random_chance(&draw->random, probability);
}

static inline uint64_t below(struct draw *draw, uint64_t bound)
{
    return sim_random_below(&draw->random, bound);
}

static inline double scale(struct draw *draw, double least, double most)
{
    return sim_random_scale(&draw->random, least, most);
}

#endif
