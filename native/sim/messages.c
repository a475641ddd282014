#include "sim/messages.h"

#include <string.h>

enum {
    TAG_ACTIVATION,
    TAG_GRADIENT,
    TAG_RING,
    TAG_FREE,
    FREE_TAGS = 3,
    TAG_GATHER = TAG_FREE + FREE_TAGS, /* one for each gather: its receives must not take another one's messages */
    STAGES_MOST = 8,
    MICROBATCHES_MOST = 8,
};

static uint32_t draw_length(const struct sim_messages *messages, struct sim_random *random)
{
    if (sim_random_chance(random, 0.2))
        return (uint32_t)sim_random_below(random, 17);
    return (uint32_t)sim_random_scale(random, 1, messages->bytes_most);
}

/* Returns the number of the call. */
static uint32_t add(struct sim_messages *messages, uint32_t from, uint32_t to, uint32_t tag, uint32_t length,
                    uint32_t after)
{
    if (messages->count == messages->capacity)
        return UINT32_MAX;
    messages->calls[messages->count] = (struct sim_call){.kind = SIM_CALL_MESSAGE,
                                                         .group = messages->group,
                                                         .from = from,
                                                         .to = to,
                                                         .tag = tag,
                                                         .length = length,
                                                         .after = after};
    return messages->count++;
}

/* One stage of a pipeline: how far it is, and the calls by which microbatches came to it. */
struct stage {
    uint32_t forward, backward; /* microbatches that are through */
    uint32_t activation[MICROBATCHES_MOST], gradient[MICROBATCHES_MOST];
};

/* The 1F1B schedule: a stage makes as many forward passes ahead as there are stages after it, and then one backward
 * pass for each forward pass. */
static void draw_pipeline(struct sim_messages *messages, struct sim_random *random)
{
    struct stage stages[STAGES_MOST] = {0};
    uint32_t count = messages->size < STAGES_MOST ? messages->size : STAGES_MOST, last = count - 1;
    uint32_t microbatches = (uint32_t)sim_random_between(random, 2, MICROBATCHES_MOST);
    uint32_t length = draw_length(messages, random);
    for (uint32_t passes = 2 * count * microbatches; passes > 0;) {
        for (uint32_t i = 0; i < count; i++) {
            struct stage *stage = &stages[i];
            uint32_t f = stage->forward, b = stage->backward;
            bool may_forward = f < microbatches && f - b <= last - i && (i == 0 || f < stages[i - 1].forward);
            bool may_backward = b < f && (i == last || b < stages[i + 1].backward);
            if (may_forward) {
                uint32_t after = i == 0 ? UINT32_MAX : stage->activation[f];
                if (i < last)
                    stages[i + 1].activation[f] = add(messages, i, i + 1, TAG_ACTIVATION, length, after);
                stage->forward++;
                passes--;
            } else if (may_backward) {
                uint32_t after = i == last ? stage->activation[b] : stage->gradient[b];
                if (i > 0)
                    stages[i - 1].gradient[b] = add(messages, i, i - 1, TAG_GRADIENT, length, after);
                stage->backward++;
                passes--;
            }
        }
    }
}

static void draw_ring(struct sim_messages *messages, struct sim_random *random)
{
    uint32_t length = draw_length(messages, random);
    for (uint64_t rounds = sim_random_between(random, 1, 4); rounds > 0; rounds--)
        for (uint32_t rank = 0; rank < messages->size; rank++)
            add(messages, rank, (rank + 1) % messages->size, TAG_RING, length, UINT32_MAX);
}

/* Another rank than this one. */
static uint32_t other(const struct sim_messages *messages, struct sim_random *random, uint32_t rank)
{
    return (rank + 1 + (uint32_t)sim_random_below(random, messages->size - 1)) % messages->size;
}

/* Receives of one tag at one rank: from given ranks first, for after one from any source their messages might be gone.
 * Where one rank sends all, given or not, they come in any order. */
static void draw_gather(struct sim_messages *messages, struct sim_random *random)
{
    uint32_t to = (uint32_t)sim_random_below(random, messages->size), length = draw_length(messages, random);
    uint64_t given = sim_random_below(random, 3), count = given + sim_random_between(random, 1, 10);
    uint32_t tag = TAG_GATHER + messages->count, only = other(messages, random, to);
    bool single = sim_random_chance(random, 0.4);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t call = add(messages, single ? only : other(messages, random, to), to, tag, length, UINT32_MAX);
        bool any = single ? sim_random_chance(random, 0.5) : i >= given;
        if (call != UINT32_MAX)
            messages->calls[call].any_source = messages->any_source && any;
    }
}

static void draw_free(struct sim_messages *messages, struct sim_random *random)
{
    for (uint64_t count = sim_random_between(random, 1, 16); count > 0; count--) {
        uint32_t from = (uint32_t)sim_random_below(random, messages->size);
        uint32_t tag = TAG_FREE + (uint32_t)sim_random_below(random, FREE_TAGS);
        add(messages, from, other(messages, random, from), tag, draw_length(messages, random), UINT32_MAX);
    }
}

void sim_messages_draw(struct sim_messages *messages, struct sim_random *random)
{
    static void (*const PATTERNS[])(struct sim_messages *, struct sim_random *) = {draw_pipeline, draw_ring,
                                                                                   draw_gather, draw_free};
    uint32_t first = messages->count;
    PATTERNS[sim_random_below(random, sizeof PATTERNS / sizeof *PATTERNS)](messages, random);
    uint8_t priority = (uint8_t)sim_random_below(random, 8);
    for (uint32_t i = first; i < messages->count; i++)
        messages->calls[i].qos.priority = priority;
}

uint64_t sim_messages_insert(const struct sim_messages *messages, struct sim_random *random, struct sim_call *calls,
                             uint32_t *count)
{
    uint32_t place = (uint32_t)sim_random_below(random, *count + 1);
    struct sim_call *at = &calls[place];
    uint64_t at_ns = calls[place < *count ? place : place - 1].at_ns, bytes = 0;
    memmove(at + messages->count, at, (*count - place) * sizeof *at);
    *count += messages->count;
    for (uint32_t i = 0; i < messages->count; i++) {
        at[i] = messages->calls[i];
        at[i].at_ns = at_ns;
        at[i].after = at[i].after == UINT32_MAX ? UINT32_MAX : at[i].after + place;
        bytes += at[i].length + 100; /* with its header */
    }
    return bytes;
}
