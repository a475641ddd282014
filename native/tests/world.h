/*
 * A job whose ranks are engines of this process: a world of engines, teams (one group over all of them) and jobs, which
 * are threads that call collectives on a team. Tests of the engine use it.
 */
#pragma once

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"
#include "engine/engine.h"
#include "group/group.h"
#include "tests/check.h"
#include "tests/draft.h"
#include "tests/mem_wire.h"

enum {
    RANKS_MAX = 4,
    WORDS = 3001, /* several packets, the last one odd */
    STAGING = 16384,
    PATIENCE_US = 20000000, /* "for ever", but a hanging test ends */
};

#define LOSS 0.05

static const uint8_t KEY[16] = "of these tests";

/* ---- a world of ranks, one engine each ---- */

struct world {
    uint32_t size;
    cl_engine *engines[RANKS_MAX];
    char bells[RANKS_MAX][CL_BELL_BYTES];
};

static inline struct cl_engine_options options_of(const char *wire, double loss)
{
    bool mem = strcmp(wire, "mem") == 0;
    mem_wire_lose(loss);
    static const char *const addresses[] = {"127.0.0.1"};
    return (struct cl_engine_options){.wire = wire,
                                      .wire_type = mem ? &mem_wire : NULL,
                                      .addresses = addresses,
                                      .address_count = strcmp(wire, "none") == 0 ? 0 : 1,
                                      .datagram_bytes = 1472,
                                      .unexpected_limit_bytes = 1 << 20,
                                      .peer_timeout_us = 3000000};
}

static inline struct world open_world_of(uint32_t size, struct cl_engine_options options)
{
    static uint64_t job = 1;
    static const char *const address = "127.0.0.1";
    static const uint32_t first = 0;
    struct world world = {.size = size};
    uint32_t ports[RANKS_MAX] = {0};
    for (uint32_t rank = 0; rank < size; rank++) {
        CHECK_EQ(cl_engine_open(&options, &world.engines[rank]), CL_OK);
        CHECK_EQ(cl_engine_bell(world.engines[rank], world.bells[rank]), CL_OK);
        CHECK_EQ(cl_engine_identify(world.engines[rank], job, KEY, (uint16_t)rank, 0), CL_OK);
        if (options.address_count > 0)
            CHECK_EQ(cl_engine_port(world.engines[rank], 0, &ports[rank]), CL_OK);
    }
    for (uint32_t rank = 0; rank < size && options.address_count > 0; rank++)
        for (uint16_t peer = 0; peer < size; peer++)
            if (peer != rank) {
                struct cl_peer_options options_of_peer = {.peer = peer,
                                                          .path_count = 1,
                                                          .local = &first,
                                                          .remote_addresses = &address,
                                                          .remote_ports = &ports[peer],
                                                          .grants = options.credit_bytes > 0};
                CHECK_EQ(cl_engine_add_peer(world.engines[rank], &options_of_peer), CL_OK);
            }
    job++;
    return world;
}

static inline struct world open_world(uint32_t size, const char *wire, double loss)
{
    return open_world_of(size, options_of(wire, loss));
}

/* One in which silence means nothing for that long. */
static inline struct world open_patient_world(uint32_t size, const char *wire, uint64_t peer_timeout_us)
{
    struct cl_engine_options options = options_of(wire, 0);
    options.peer_timeout_us = peer_timeout_us;
    return open_world_of(size, options);
}

static inline void close_world(struct world *world)
{
    for (uint32_t rank = 0; rank < world->size; rank++)
        cl_engine_close(world->engines[rank]);
}

#define SCOPED_WORLD SCOPED(close_world) struct world

/* One group over all ranks of a world, and a plan that adds everybody's input up. */
struct team {
    struct world *world;
    bool shared;
    cl_group *groups[RANKS_MAX];
    cl_plan *plans[RANKS_MAX];
};

static inline struct cl_group_options group_options(const struct world *world, uint32_t id, uint32_t rank, int32_t fd)
{
    static const uint16_t peers[] = {0, 1, 2, 3};
    static const uint32_t ranks[] = {0, 1, 2, 3};
    return (struct cl_group_options){.id = id,
                                     .rank = rank,
                                     .size = world->size,
                                     .peers = peers,
                                     .local = fd >= 0 ? ranks : &ranks[rank],
                                     .local_count = fd >= 0 ? world->size : 1,
                                     .host_fd = fd,
                                     .staging_bytes = STAGING,
                                     .spin_us = 20,
                                     .bells = &world->bells[0][0]};
}

static inline struct team open_team(struct world *world, uint32_t id, bool shared)
{
    struct team team = {.world = world, .shared = shared};
    int32_t fd = -1;
    if (shared)
        CHECK_EQ(cl_host_create(world->size, STAGING, &fd), CL_OK);
    for (uint32_t rank = 0; rank < world->size; rank++) {
        struct cl_group_options options = group_options(world, id, rank, fd);
        CHECK_EQ(cl_group_open(world->engines[rank], &options, &team.groups[rank]), CL_OK);
        team.plans[rank] = shared ? draft_host_exchange(rank, world->size, 4 * WORDS, STAGING)
                                  : draft_exchange(rank, world->size, 4 * WORDS);
        CHECK(team.plans[rank] != NULL);
    }
    cl_host_close_fd(fd);
    return team;
}

static inline void close_team(struct team *team)
{
    for (uint32_t rank = 0; rank < team->world->size; rank++) {
        if (team->groups[rank] != NULL)
            cl_group_close(team->groups[rank]);
        cl_plan_release(team->plans[rank]);
    }
}

#define SCOPED_TEAM SCOPED(close_team) struct team

/* ---- messages ---- */

static inline cl_operation *start_send(struct team *team, uint32_t from, uint32_t to, uint32_t tag, const void *data,
                                       uint64_t length, uint64_t timeout_us)
{
    cl_operation *operation = NULL;
    struct cl_message_request request = {.rank = to,
                                         .tag = tag,
                                         .memory = (void *)(uintptr_t)data,
                                         .length = length,
                                         .priority = 4,
                                         .timeout_us = timeout_us};
    CHECK_EQ(cl_send(team->groups[from], &request, &operation), CL_OK);
    return operation;
}

/* From UINT32_MAX: from any rank. */
static inline cl_operation *start_receive(struct team *team, uint32_t at, uint32_t from, uint32_t tag, void *target,
                                          uint64_t length, uint64_t timeout_us)
{
    cl_operation *operation = NULL;
    struct cl_message_request request = {
        .rank = from, .tag = tag, .memory = target, .length = length, .timeout_us = timeout_us};
    CHECK_EQ(cl_receive(team->groups[at], &request, &operation), CL_OK);
    return operation;
}

static inline int finish(cl_operation *operation)
{
    int status = cl_operation_wait(operation, 0);
    cl_operation_release(operation);
    return status;
}

/* ---- one rank's call, and many ---- */

struct call {
    uint32_t input[WORDS], output[WORDS];
};

static inline struct call *make_call(uint32_t rank, uint32_t round)
{
    struct call *call = calloc(1, sizeof *call);
    for (uint32_t i = 0; i < WORDS; i++)
        call->input[i] = i + round + (1000000u << rank);
    return call;
}

static inline void check_call(const struct call *call, uint32_t size, uint32_t round)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < WORDS; i++)
        wrong += call->output[i] != size * (i + round) + 1000000u * ((1u << size) - 1);
    CHECK_EQ(wrong, 0);
}

/* The sum of the call's words over all ranks. */
static inline struct cl_operation_request request_of(const struct team *team, uint32_t rank, struct call *call,
                                                     uint64_t timeout_us)
{
    return (struct cl_operation_request){.plan = team->plans[rank],
                                         .input = call->input,
                                         .output = call->output,
                                         .dtype = CL_U32,
                                         .op = CL_SUM,
                                         .qos = {.priority = 4},
                                         .timeout_us = timeout_us};
}

static inline int run_call(struct team *team, uint32_t rank, struct call *call, uint64_t timeout_us)
{
    struct cl_operation_request request = request_of(team, rank, call, timeout_us);
    return cl_run(team->groups[rank], &request);
}

static inline int submit_call(struct team *team, uint32_t rank, struct call *call, uint64_t timeout_us,
                              cl_operation **out)
{
    struct cl_operation_request request = request_of(team, rank, call, timeout_us);
    return cl_submit(team->groups[rank], &request, out);
}

struct job {
    struct team *team;
    uint32_t rank, rounds, submit_every; /* 0: never */
    uint32_t constant_round;             /* not 0: every call is the same, for threads in no common order */
    int expected;
    uint64_t timeout_us;
    atomic_int status;
    pthread_t thread;
};

static inline void *work(void *argument)
{
    struct job *job = argument;
    for (uint32_t round = 1; round <= job->rounds; round++) {
        uint32_t value = job->constant_round != 0 ? job->constant_round : round;
        struct call *call = make_call(job->rank, value);
        int status;
        if (job->submit_every != 0 && round % job->submit_every == 0) {
            cl_operation *operation;
            status = submit_call(job->team, job->rank, call, job->timeout_us, &operation);
            CHECK_EQ(status, CL_OK);
            status = cl_operation_wait(operation, 0);
            CHECK_EQ(cl_operation_status(operation), status);
            cl_operation_release(operation);
        } else {
            status = run_call(job->team, job->rank, call, job->timeout_us);
        }
        CHECK_EQ(status, job->expected);
        if (status == CL_OK)
            check_call(call, job->team->world->size, value);
        free(call);
        atomic_store(&job->status, status);
        if (status != CL_OK)
            break;
    }
    return NULL;
}

static inline void run_jobs(struct job *jobs, size_t count)
{
    for (size_t i = 0; i < count; i++)
        pthread_create(&jobs[i].thread, NULL, work, &jobs[i]);
    for (size_t i = 0; i < count; i++)
        pthread_join(jobs[i].thread, NULL);
}
