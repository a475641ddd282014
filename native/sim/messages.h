/*
 * Messages: patterns of point-to-point calls, as training makes them: a pipeline (1F1B: activations forward, gradients
 * back, several microbatches in flight), a ring, a gather from any source, and messages without a pattern.
 *
 * Ranks make their calls in order, and all of them in the same one, so the patterns cannot deadlock.
 */
#ifndef CL_SIM_MESSAGES_H
#define CL_SIM_MESSAGES_H

#include "sim/call.h"
#include "sim/random.h"

struct sim_messages {
    struct sim_call *calls; /* the first `count` of `capacity` are used */
    uint32_t count, capacity;
    uint32_t group, size; /* for the next pattern */
    uint32_t bytes_most;  /* of a message */
    bool any_source;      /* it may be used */
};

/* Adds one pattern; as much of it as there is room for. */
void sim_messages_draw(struct sim_messages *messages, struct sim_random *random);
/* Puts them all at one place into the list of calls, which has room for them. Returns their bytes. */
uint64_t sim_messages_insert(const struct sim_messages *messages, struct sim_random *random, struct sim_call *calls,
                             uint32_t *count);

#endif
