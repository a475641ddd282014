/*
 * All-reduces of four hosts in virtual time: the production engine runs the plan of plans/direct.py, cut into segments
 * as by default.
 */
#pragma once

#include "plan/executor.h"
#include "tests/check.h"
#include "tests/network.h"

enum { HOSTS = 4, SEGMENT_BYTES = 256 << 10, STEPS_PER_SEGMENT = 3 * HOSTS, WARM = 2, MEASURED = 5 };

static inline void add(void *target, const void *source, size_t count)
{
    uint32_t *to = target;
    const uint32_t *from = source;
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

static const struct cl_arithmetic ADDITION = {.element_bytes = 4, .reduce = add};

/* The plan direct.all_reduce: per segment each rank sends the owners their shards, reduces its own, sends it back. The
 * shards of a segment have these lengths, of which some may be 0. */
static inline cl_plan *all_reduce_plan(uint32_t rank, uint32_t segments, const uint32_t *lengths)
{
    struct cl_step *steps = calloc((size_t)segments * STEPS_PER_SEGMENT, sizeof *steps);
    uint32_t *successors = calloc((size_t)segments * STEPS_PER_SEGMENT * HOSTS, sizeof *successors);
    uint32_t count = 0, edges = 0, offsets[HOSTS] = {0};
    for (uint32_t i = 1; i < HOSTS; i++)
        offsets[i] = offsets[i - 1] + lengths[i - 1];
    for (uint32_t segment = 0; segment < segments; segment++) {
        uint64_t start = (uint64_t)segment * SEGMENT_BYTES;
        uint32_t contributions = 0;
        for (uint32_t i = 1; i < HOSTS; i++)
            contributions += lengths[(rank + i) % HOSTS] > 0;
        uint32_t results = count + contributions + HOSTS - 1;
        for (int phase = 0; phase < 4; phase++)
            for (uint32_t i = 1; i < HOSTS; i++) {
                uint32_t peer = (rank + i) % HOSTS, owner = phase == 0 || phase == 3 ? peer : rank;
                if (!lengths[owner])
                    continue;
                struct cl_step *step = &steps[count++];
                *step = (struct cl_step){.kind = (uint16_t)(phase == 0 || phase == 2 ? CL_SEND
                                                            : phase == 1             ? CL_RECV_REDUCE
                                                                                     : CL_RECV_COPY),
                                         .peer = peer,
                                         .source = CL_OUTPUT,
                                         .target = CL_OUTPUT,
                                         .source_offset = start + offsets[owner],
                                         .target_offset = start + offsets[owner],
                                         .length = lengths[owner],
                                         .message = 2 * segment + (phase >= 2),
                                         .dependencies = phase == 2 ? HOSTS - 1 : 0,
                                         .successor_first = edges,
                                         .successor_count = phase == 1 ? HOSTS - 1 : 0};
                for (uint32_t j = 0; j < step->successor_count; j++)
                    successors[edges++] = results + j;
            }
    }
    cl_plan *plan = NULL;
    struct cl_plan_options options = {.steps = steps,
                                      .step_count = count,
                                      .successors = successors,
                                      .successor_count = edges,
                                      .rank = rank,
                                      .world_size = HOSTS,
                                      .output_bytes = (uint64_t)segments * SEGMENT_BYTES};
    CHECK_EQ(cl_plan_create(&options, &plan), CL_OK);
    free(steps);
    free(successors);
    return plan;
}

struct run {
    struct network *network;
    struct cl_executor *executor;
    uint32_t index;
    bool done;
    uint64_t done_us;
};

static inline void go_on(struct run *run)
{
    enum cl_progress progress;
    do
        progress = cl_executor_poll(run->executor, SIZE_MAX, network_now_us(run->network));
    while (progress == CL_PROGRESS_MORE);
    CHECK(progress != CL_PROGRESS_FAILED);
    if (progress == CL_PROGRESS_DONE && !run->done) {
        run->done = true;
        run->done_us = network_now_us(run->network);
    }
}

static inline void completed(struct network_host *host, const struct cl_completion *completion)
{
    cl_executor_complete(completion->context, completion->status);
    go_on(host->argument);
}

/* The mean time of several all-reduces. The shards of each segment have these lengths. */
static inline double all_reduce_us(struct network *network, uint32_t bytes, const uint32_t *lengths)
{
    static const uint16_t PEERS[HOSTS] = {0, 1, 2, 3};
    struct run runs[HOSTS];
    cl_plan *plans[HOSTS];
    uint8_t *data[HOSTS];
    static uint32_t sequence; /* goes on: a network may run several */
    uint64_t spent_us = 0;
    for (uint32_t i = 0; i < HOSTS; i++) {
        plans[i] = all_reduce_plan(i, bytes / SEGMENT_BYTES, lengths);
        data[i] = calloc(1, bytes);
    }
    for (uint32_t round = 0; round < WARM + MEASURED; round++) {
        uint64_t start_us = network_now_us(network), end_us = 0;
        for (uint32_t i = 0; i < HOSTS; i++) {
            for (uint32_t at = 0; at < bytes / 4; at++)
                ((uint32_t *)(void *)data[i])[at] = at + i;
            runs[i] = (struct run){.network = network, .index = i};
            struct cl_executor_config config = {.plan = plans[i],
                                                .output = data[i],
                                                .input = data[i],
                                                .arithmetic = ADDITION,
                                                .endpoint = network->hosts[i].endpoint,
                                                .peers = PEERS,
                                                .group = 1,
                                                .sequence = sequence};
            CHECK_EQ(cl_executor_create(&config, &runs[i].executor), CL_OK);
            network->hosts[i].on_completion = completed;
            network->hosts[i].argument = &runs[i];
            go_on(&runs[i]);
            network_wake(network, i);
        }
        for (uint32_t i = 0; i < HOSTS; i++)
            while (!runs[i].done && network_step(network, start_us + 60000000))
                ;
        for (uint32_t i = 0; i < HOSTS; i++) {
            CHECK(runs[i].done);
            end_us = runs[i].done_us > end_us ? runs[i].done_us : end_us;
            cl_executor_destroy(runs[i].executor);
            uint32_t wrong = 0;
            for (uint32_t at = 0; at < bytes / 4; at++)
                wrong += ((uint32_t *)(void *)data[i])[at] != HOSTS * at + 6;
            CHECK_EQ(wrong, 0);
        }
        sequence++;
        if (round >= WARM)
            spent_us += end_us - start_us;
    }
    for (uint32_t i = 0; i < HOSTS; i++) {
        cl_plan_release(plans[i]);
        free(data[i]);
    }
    return (double)spent_us / MEASURED;
}

static const uint32_t EQUAL_SHARDS[HOSTS] = {SEGMENT_BYTES / HOSTS, SEGMENT_BYTES / HOSTS, SEGMENT_BYTES / HOSTS,
                                             SEGMENT_BYTES / HOSTS};

/* Time that a link needs for this payload. */
static inline double link_us(double bytes, double mbit_per_s)
{
    return bytes * 1514 / 1432 * 8 / mbit_per_s;
}

/* Time the links need for the payload of several all-reduces over the time these take, in percent. Frees the network.
 */
static inline double efficiency(struct network *network, uint32_t bytes, double mbit_per_s)
{
    double spent_us = all_reduce_us(network, bytes, EQUAL_SHARDS);
    network_free(network);
    return 100 * link_us(2.0 * (HOSTS - 1) / HOSTS * bytes, mbit_per_s) / spent_us;
}

/* Shards of a segment of which host 1 owns none. */
static inline void shards_without_host_1(uint32_t *lengths)
{
    enum { THIRD = SEGMENT_BYTES / 3 / 64 * 64 };
    lengths[0] = SEGMENT_BYTES - 2 * THIRD;
    lengths[1] = 0;
    lengths[2] = lengths[3] = THIRD;
}
