/* Engines, groups and operations, with threads as ranks: over memory that loses packets, over UDP on loopback, and in
 * shared memory. The sanitizers see these tests too: half of them are about who frees what, and when. */
#include "check.h"
#include "draft.h"
#include "engine.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A test asks for more memory than there is. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

enum {
    RANKS_MAX = 4,
    WORDS = 3001, /* several packets, the last one odd */
    STAGING = 16384,
    PATIENCE_US = 20000000, /* "for ever", but a hanging test ends */
    LOSS_PPM = 50000,
};

/* ---- a world of ranks, one engine each ---- */

struct world {
    uint32_t size;
    cl_engine *engines[RANKS_MAX];
    char bells[RANKS_MAX][CL_BELL_BYTES];
};

static struct cl_engine_options options_of(const char *wire, uint32_t loss_ppm)
{
    static const char *const addresses[] = {"127.0.0.1"};
    return (struct cl_engine_options){.wire = wire,
                                      .addresses = addresses,
                                      .address_count = strcmp(wire, "none") == 0 ? 0 : 1,
                                      .datagram_bytes = 1472,
                                      .congestion = "delay",
                                      .stash_bytes = 1 << 20,
                                      .peer_timeout_us = 3000000,
                                      .mem_loss_ppm = loss_ppm,
                                      .mem_seed = 1};
}

static struct world open_world(uint32_t size, const char *wire, uint32_t loss_ppm)
{
    static uint64_t job = 1;
    static const char *const address = "127.0.0.1";
    static const uint32_t first = 0;
    struct world world = {.size = size};
    struct cl_engine_options options = options_of(wire, loss_ppm);
    uint32_t ports[RANKS_MAX] = {0};
    for (uint32_t rank = 0; rank < size; rank++) {
        options.mem_seed = rank;
        CHECK_EQ(cl_engine_open(&options, &world.engines[rank]), CL_OK);
        CHECK_EQ(cl_engine_bell(world.engines[rank], world.bells[rank]), CL_OK);
        CHECK_EQ(cl_engine_identify(world.engines[rank], job, (uint16_t)rank, 0), CL_OK);
        if (options.address_count > 0)
            CHECK_EQ(cl_engine_port(world.engines[rank], 0, &ports[rank]), CL_OK);
    }
    for (uint32_t rank = 0; rank < size && options.address_count > 0; rank++)
        for (uint16_t peer = 0; peer < size; peer++)
            if (peer != rank)
                CHECK_EQ(cl_engine_add_peer(world.engines[rank], peer, 1, &first, &address, &ports[peer]), CL_OK);
    job++;
    return world;
}

static void close_world(struct world *world)
{
    for (uint32_t rank = 0; rank < world->size; rank++)
        cl_engine_close(world->engines[rank]);
}

/* One group over all ranks of a world, and a plan that adds everybody's input up. */
struct team {
    struct world *world;
    bool shared;
    cl_group *groups[RANKS_MAX];
    cl_plan *plans[RANKS_MAX];
};

static struct cl_group_options group_options(const struct world *world, uint32_t id, uint32_t rank, int32_t fd)
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

static struct team open_team(struct world *world, uint32_t id, bool shared)
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

static void close_team(struct team *team)
{
    for (uint32_t rank = 0; rank < team->world->size; rank++) {
        if (team->groups[rank] != NULL)
            cl_group_close(team->groups[rank]);
        cl_plan_release(team->plans[rank]);
    }
}

/* ---- one rank's call, and many ---- */

struct call {
    uint32_t input[WORDS], output[WORDS];
};

static struct call *make_call(uint32_t rank, uint32_t round)
{
    struct call *call = calloc(1, sizeof *call);
    for (uint32_t i = 0; i < WORDS; i++)
        call->input[i] = i + round + (1000000u << rank);
    return call;
}

static void check_call(const struct call *call, uint32_t size, uint32_t round)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < WORDS; i++)
        wrong += call->output[i] != size * (i + round) + 1000000u * ((1u << size) - 1);
    CHECK_EQ(wrong, 0);
}

static int run_call(struct team *team, uint32_t rank, struct call *call, uint64_t timeout_us)
{
    return cl_run(team->groups[rank], team->plans[rank], call->input, call->output, CL_U32, CL_SUM, 4, timeout_us);
}

static int submit_call(struct team *team, uint32_t rank, struct call *call, uint64_t timeout_us, cl_operation **out)
{
    return cl_submit(team->groups[rank], team->plans[rank], call->input, call->output, CL_U32, CL_SUM, 4, timeout_us,
                     out);
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

static void *work(void *argument)
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

static void run_jobs(struct job *jobs, size_t count)
{
    for (size_t i = 0; i < count; i++)
        pthread_create(&jobs[i].thread, NULL, work, &jobs[i]);
    for (size_t i = 0; i < count; i++)
        pthread_join(jobs[i].thread, NULL);
}

/* Every rank runs `rounds` calls, each with the right sum. */
static void exercise(uint32_t size, const char *wire, uint32_t loss_ppm, bool shared, uint32_t rounds)
{
    struct world world = open_world(size, wire, loss_ppm);
    struct team team = open_team(&world, 1, shared);
    struct job jobs[RANKS_MAX];
    for (uint32_t rank = 0; rank < size; rank++)
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = rounds, .submit_every = 3, .timeout_us = PATIENCE_US};
    run_jobs(jobs, size);
    struct cl_engine_stats stats;
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &stats), CL_OK);
    CHECK_EQ(stats.operations_done, rounds);
    CHECK_EQ(stats.operations_failed, 0);
    CHECK((stats.packets_sent > 0) == (strcmp(wire, "none") != 0));
    CHECK(loss_ppm == 0 || stats.packets_retransmitted > 0);
    close_team(&team);
    close_world(&world);
}

static void test_mem(void)
{
    exercise(3, "mem", 0, false, 30);
}

static void test_mem_with_loss(void)
{
    exercise(3, "mem", LOSS_PPM, false, 60);
}

static void test_udp(void)
{
    exercise(4, "udp", 0, false, 30);
}

static void test_shared_memory(void)
{
    exercise(4, "none", 0, true, 100);
}

/* Two ranks share memory, the third is alone on its host: every rank's plan posts all the same. */
static void test_mixed_hosts(void)
{
    struct world world = open_world(3, "mem", 0);
    struct team team = {.world = &world};
    static const uint32_t pair[] = {0, 1};
    int32_t fd;
    CHECK_EQ(cl_host_create(2, STAGING, &fd), CL_OK);
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct cl_group_options options = group_options(&world, 1, rank, -1);
        if (rank < 2) {
            options.local = pair;
            options.local_count = 2;
            options.host_fd = fd;
        }
        CHECK_EQ(cl_group_open(world.engines[rank], &options, &team.groups[rank]), CL_OK);
        struct draft draft = {.rank = rank, .world_size = 3, .input_bytes = 4, .output_bytes = 4};
        uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
        if (rank < 2)
            last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1 - rank, .message = 1}, last);
        if (rank == 0)
            draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 2, .length = 4}, last);
        if (rank == 2)
            draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 4}, last);
        team.plans[rank] = draft_finish(&draft);
    }
    cl_host_close_fd(fd);
    for (int round = 0; round < 5; round++) {
        struct call *calls[3];
        cl_operation *operations[3];
        for (uint32_t rank = 0; rank < 3; rank++) {
            calls[rank] = make_call(rank, 1);
            CHECK_EQ(submit_call(&team, rank, calls[rank], PATIENCE_US, &operations[rank]), CL_OK);
        }
        for (uint32_t rank = 0; rank < 3; rank++)
            CHECK_EQ(cl_operation_wait(operations[rank], 0), CL_OK);
        CHECK_EQ(calls[2]->output[0], calls[0]->input[0]);
        for (uint32_t rank = 0; rank < 3; rank++) {
            cl_operation_release(operations[rank]);
            free(calls[rank]);
        }
    }
    close_team(&team);
    close_world(&world);
}

static void test_alone(void)
{
    exercise(1, "none", 0, false, 3);
}

/* ---- many threads, many groups ---- */

static void test_many_threads(void)
{
    enum { TEAMS = 3, THREADS = 3, RANKS = 2 };
    struct world world = open_world(RANKS, "mem", LOSS_PPM);
    struct team teams[TEAMS];
    struct job jobs[TEAMS * THREADS * RANKS];
    size_t count = 0;
    for (uint32_t t = 0; t < TEAMS; t++)
        teams[t] = open_team(&world, 1 + t, t > 0);
    for (uint32_t t = 0; t < TEAMS; t++)
        for (uint32_t i = 0; i < THREADS; i++)
            for (uint32_t rank = 0; rank < RANKS; rank++)
                jobs[count++] = (struct job){.team = &teams[t],
                                             .rank = rank,
                                             .rounds = 25,
                                             .submit_every = 2 + i,
                                             .constant_round = 5,
                                             .timeout_us = PATIENCE_US};
    run_jobs(jobs, count);
    for (uint32_t t = 0; t < TEAMS; t++)
        close_team(&teams[t]);
    close_world(&world);
}

static void test_many_in_flight(void)
{
    enum { CALLS = 40, RANKS = 2 };
    for (int shared = 0; shared < 2; shared++) {
        struct world world = open_world(RANKS, "mem", 0);
        struct team team = open_team(&world, 1, shared);
        struct call *calls[RANKS][CALLS];
        cl_operation *operations[RANKS][CALLS];
        for (uint32_t i = 0; i < CALLS; i++) {
            for (uint32_t rank = 0; rank < RANKS; rank++) {
                calls[rank][i] = make_call(rank, i);
                CHECK_EQ(submit_call(&team, rank, calls[rank][i], PATIENCE_US, &operations[rank][i]), CL_OK);
            }
        }
        for (uint32_t i = CALLS; i-- > 0;) {
            for (uint32_t rank = 0; rank < RANKS; rank++) {
                CHECK_EQ(cl_operation_wait(operations[rank][i], 0), CL_OK);
                cl_operation_release(operations[rank][i]);
                check_call(calls[rank][i], RANKS, i);
                free(calls[rank][i]);
            }
        }
        close_team(&team);
        close_world(&world);
    }
}

/* Both 32-bit counters of a group's order pass zero in the middle. */
static void test_counters_wrap(void)
{
    struct world world = open_world(2, "none", 0);
    struct team team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_group *group = team.groups[rank];
        group->sequence = UINT32_MAX - 10;
        group->host_base = group->host_previous_base = UINT32_MAX - 20;
        atomic_store(group->counters[rank], UINT32_MAX - 20);
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 30, .submit_every = 2, .timeout_us = PATIENCE_US};
    }
    run_jobs(jobs, 2);
    CHECK(team.groups[0]->host_base < 100);
    close_team(&team);
    close_world(&world);
}

/* A host operation waits for its turn, and the turn comes while the engine is about to sleep. */
static void test_a_turn_that_comes_late(void)
{
    struct world world = open_world(1, "none", 0);
    struct team team = open_team(&world, 1, false);
    struct cl_group *group = team.groups[0];
    cl_plan *plan = draft_host_exchange(0, 1, 4, STAGING);
    uint32_t word = 1;
    struct cl_operation *operation;
    CHECK_EQ(cl_operation_create(group, plan, &word, &word, CL_U32, CL_SUM, 0, 0, &operation), CL_OK);
    uint64_t deadline_us = UINT64_MAX;
    pthread_mutex_lock(&world.engines[0]->core);
    group->first = operation; /* as if just looked at, and not yet allowed to start */
    CHECK(!cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    group->lane_taken = true; /* a calling thread is before it, and wakes the engine when it leaves */
    CHECK(cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    group->lane_taken = false;
    group->first = NULL;
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_operation_finish(operation, CL_OK);
    cl_operation_release(operation);
    cl_plan_release(plan);
    close_team(&team);
    close_world(&world);
}

/* ---- events ---- */

static void test_events(void)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, false);
    struct call *calls[2] = {make_call(0, 1), make_call(1, 1)};
    cl_operation *operations[2];
    struct cl_event events[4];
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, 1000), 0);
    CHECK_EQ(submit_call(&team, 0, calls[0], PATIENCE_US, &operations[0]), CL_OK);
    CHECK_EQ(cl_operation_status(operations[0]), CL_EAGAIN);
    CHECK_EQ(cl_operation_wait(operations[0], 1000), CL_EAGAIN);
    CHECK_EQ(cl_operation_notify(operations[0], 42), CL_EAGAIN);
    CHECK_EQ(cl_operation_notify(operations[0], 43), CL_EINVAL); /* one event, and the first token's */
    CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, PATIENCE_US), 1);
    CHECK_EQ(events[0].token, 42);
    CHECK_EQ(events[0].status, CL_OK);
    CHECK_EQ(cl_operation_wait(operations[1], 0), CL_OK);
    if (cl_operation_notify(operations[1], 44) == CL_EAGAIN) /* just in time */
        CHECK_EQ(cl_engine_events(world.engines[1], events, 4, PATIENCE_US), 1);
    CHECK_EQ(cl_engine_events(world.engines[1], events, 4, 1000), 0);
    cl_engine_stop_events(world.engines[0]);
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, PATIENCE_US), CL_ECLOSED);
    for (size_t rank = 0; rank < 2; rank++) {
        cl_operation_release(operations[rank]);
        free(calls[rank]);
    }
    close_team(&team);
    close_world(&world);
}

/* More events than the ring begins with, and events that nobody takes before the engine closes. */
static void test_many_events(void)
{
    enum { CALLS = 700 };
    struct world world = open_world(1, "none", 0);
    struct team team = open_team(&world, 1, false);
    struct call *call = make_call(0, 1);
    uint32_t taken = 0, ended = 0;
    for (uint64_t token = 1; token <= CALLS; token++) {
        cl_operation *operation;
        CHECK_EQ(submit_call(&team, 0, call, 0, &operation), CL_OK);
        ended += cl_operation_notify(operation, token) == CL_OK;
        cl_operation_wait(operation, 0);
        cl_operation_release(operation); /* the event comes all the same */
        if (token == 100) {
            struct cl_event events[64];
            taken += (uint32_t)cl_engine_events(world.engines[0], events, 64, 1000); /* so that the ring wraps */
        }
    }
    for (uint32_t more = 1; taken + ended < CALLS - 5 && more > 0; taken += more) {
        struct cl_event events[5];
        more = (uint32_t)cl_engine_events(world.engines[0], events, 5, PATIENCE_US);
    }
    CHECK(taken + ended >= CALLS - 5 && taken + ended <= CALLS);
    free(call);
    close_team(&team);
    close_world(&world);
}

/* ---- failures ---- */

static void test_bad_arguments(void)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, false);
    struct call *call = make_call(0, 1);
    cl_operation *operation;
    CHECK_EQ(submit_call(&team, 0, call, 0, NULL), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], team.plans[1], call, call, CL_U32, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], NULL, call, call, CL_U32, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(NULL, team.plans[0], call, call, CL_U32, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], team.plans[0], call, call, 99, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], team.plans[0], call, call, -1, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], team.plans[0], call, call, CL_U32, 99, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], team.plans[0], call, call, CL_U32, CL_SUM, 8, 0, &operation), CL_EINVAL);
    cl_plan *host = draft_host_exchange(0, 2, 4, STAGING);
    CHECK_EQ(cl_submit(team.groups[0], host, call, call, CL_U32, CL_SUM, 0, 0, &operation), CL_EINVAL);
    CHECK_EQ(cl_run(team.groups[0], host, call, call, CL_U32, CL_SUM, 0, 0), CL_EINVAL);
    cl_plan_release(host);
    CHECK_EQ(cl_group_status(team.groups[0], NULL), CL_OK); /* none of it harmed the group */

    struct cl_group_options sound = group_options(&world, 2, 0, -1), options;
    cl_group *group;
    uint32_t beyond[] = {0, 2}, unordered[] = {1, 0};
#define OPEN_REFUSED(change)                                                                                           \
    do {                                                                                                               \
        options = sound;                                                                                               \
        change;                                                                                                        \
        CHECK_EQ(cl_group_open(world.engines[0], &options, &group), CL_EINVAL);                                        \
    } while (0)
    OPEN_REFUSED(options.rank = 2);
    OPEN_REFUSED(options.local_count = 0);
    OPEN_REFUSED(options.local_count = 3);
    OPEN_REFUSED(options.local = beyond + 1);
    OPEN_REFUSED((options.local = beyond, options.local_count = 2));
    OPEN_REFUSED((options.local = unordered, options.local_count = 2));
    OPEN_REFUSED((options.local_count = 2, options.local = group_options(&world, 2, 0, 0).local)); /* no memory: -1 */
    CHECK_EQ(cl_group_open(world.engines[0], NULL, &group), CL_EINVAL);
    free(call);
    close_team(&team);
    close_world(&world);
}

static void test_open_errors(void)
{
    cl_engine *engine;
    struct cl_engine_options options = options_of("mem", 0);
    options.wire = "pigeon";
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options = options_of("mem", 0);
    options.address_count = 0;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options.address_count = CL_PORTS_MAX + 1;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    options = options_of("mem", 0);
    options.congestion = NULL;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_EINVAL);
    static const char *const nowhere[] = {"192.0.2.1"};
    options = options_of("udp", 0);
    options.addresses = nowhere;
    CHECK_EQ(cl_engine_open(&options, &engine), CL_ESYSTEM);
    options = options_of("mem", 0);
    CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
    uint32_t port, local = 7, remote = 3;
    const char *address = "127.0.0.1";
    CHECK_EQ(cl_engine_port(engine, 1, &port), CL_EINVAL);
    CHECK_EQ(cl_engine_add_peer(engine, 1, 1, &local, &address, &remote), CL_EINVAL); /* who are we? */
    CHECK_EQ(cl_engine_identify(engine, 5, 0, 0), CL_OK);
    CHECK_EQ(cl_engine_identify(engine, 5, 0, 0), CL_OK);
    CHECK_EQ(cl_engine_identify(engine, 6, 0, 0), CL_EINVAL);
    CHECK_EQ(cl_engine_add_peer(engine, 1, 1, &local, &address, &remote), CL_EINVAL); /* no such port of ours */
    CHECK_EQ(cl_engine_add_peer(engine, CL_PEERS_MAX, 1, &local, &address, &remote), CL_EINVAL);
    cl_engine_close(engine);
    cl_engine_close(NULL);
}

/* Rank 0 calls, nobody else does. */
static void time_out(bool shared, bool here)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, shared);
    struct call *call = make_call(0, 1);
    cl_operation *operation;
    if (here) {
        CHECK_EQ(run_call(&team, 0, call, 50000), CL_ETIMEDOUT);
    } else {
        CHECK_EQ(submit_call(&team, 0, call, 50000, &operation), CL_OK);
        CHECK_EQ(cl_operation_wait(operation, 0), CL_ETIMEDOUT);
        cl_operation_release(operation);
    }
    CHECK_EQ(cl_group_status(team.groups[0], NULL), CL_ETIMEDOUT);
    CHECK_EQ(run_call(&team, 0, call, 0), CL_ETIMEDOUT); /* and ever after, at once */
    CHECK_EQ(run_call(&team, 1, call, PATIENCE_US), CL_EABORTED);
    CHECK_EQ(submit_call(&team, 1, call, PATIENCE_US, &operation), CL_OK);
    CHECK_EQ(cl_operation_wait(operation, 0), CL_EABORTED);
    cl_operation_release(operation);
    free(call);
    close_team(&team);
    close_world(&world);
}

static void test_timeout(void)
{
    time_out(false, true);
    time_out(false, false);
    time_out(true, true);
    time_out(true, false);
}

static void test_longest_timeout(void)
{
    struct world world = open_world(2, "none", 0);
    struct team team = open_team(&world, 1, true);
    struct job first = {.team = &team, .rank = 0, .rounds = 1, .timeout_us = UINT64_MAX};
    struct job second = {.team = &team, .rank = 1, .rounds = 1, .timeout_us = PATIENCE_US};
    pthread_create(&first.thread, NULL, work, &first);
    usleep(10000);
    run_jobs(&second, 1);
    pthread_join(first.thread, NULL);
    close_team(&team);
    close_world(&world);
}

/* What a rank that gives up leaves behind must not look like a result to the others: here rank 1 waits for rank 0's
 * second post, while rank 0 waits for a third rank, in vain. */
static void test_no_result_from_a_rank_that_failed(void)
{
    struct world world = open_world(3, "none", 0);
    struct team team = open_team(&world, 1, true);
    struct draft draft = {.rank = 0, .world_size = 3, .staging_bytes = STAGING};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 2, .message = 1}, DRAFT_NONE);
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .message = 1}, last);
    cl_plan_release(team.plans[0]);
    team.plans[0] = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 3, .staging_bytes = STAGING};
    last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 0, .message = 1}, DRAFT_NONE);
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = 1, .message = 1}, last);
    cl_plan_release(team.plans[1]);
    team.plans[1] = draft_finish(&draft);
    struct job jobs[] = {
        {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ETIMEDOUT, .timeout_us = 50000},
        {.team = &team, .rank = 1, .rounds = 1, .expected = CL_EABORTED, .timeout_us = PATIENCE_US},
    };
    run_jobs(jobs, 2);
    close_team(&team);
    close_world(&world);
}

/* One rank has no memory for its operation: the others must not wait for it. */
static void test_no_memory(void)
{
    struct world world = open_world(2, "none", 0);
    struct team team = open_team(&world, 1, true);
    struct draft draft = {.world_size = 2, .scratch_bytes = UINT64_MAX / 4};
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .message = 1}, DRAFT_NONE);
    cl_plan_release(team.plans[0]);
    team.plans[0] = draft_finish(&draft);
    struct job jobs[] = {
        {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ENOMEM, .timeout_us = PATIENCE_US},
        {.team = &team, .rank = 1, .rounds = 1, .expected = CL_EABORTED, .timeout_us = PATIENCE_US},
    };
    run_jobs(jobs, 2);
    close_team(&team);
    close_world(&world);
}

/* Bells that nobody hears cost time, not the operation. */
static void test_lost_bells(void)
{
    struct world world = open_world(2, "none", 0);
    memset(world.bells, 'x', sizeof world.bells);
    struct team team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 2, .submit_every = 1, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2);
    close_team(&team);
    close_world(&world);
}

/* All ranks but the last are inside an operation when one of them aborts. */
static void abort_while_waiting(bool shared, uint32_t submit_every)
{
    struct world world = open_world(4, "mem", 0);
    struct team team = open_team(&world, 1, shared);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++) {
        jobs[rank] = (struct job){.team = &team,
                                  .rank = rank,
                                  .rounds = 1,
                                  .submit_every = submit_every,
                                  .expected = CL_EABORTED,
                                  .timeout_us = PATIENCE_US};
        pthread_create(&jobs[rank].thread, NULL, work, &jobs[rank]);
    }
    usleep(10000);
    cl_group_abort(team.groups[1], CL_EABORTED);
    cl_group_abort(team.groups[1], CL_ETIMEDOUT); /* the first reason stays */
    for (uint32_t rank = 0; rank < 3; rank++)
        pthread_join(jobs[rank].thread, NULL);
    CHECK_EQ(cl_group_status(team.groups[1], NULL), CL_EABORTED);
    struct call *late = make_call(3, 1);
    CHECK_EQ(run_call(&team, 3, late, PATIENCE_US), CL_EABORTED);
    free(late);
    close_team(&team);
    close_world(&world);
}

static void test_abort(void)
{
    abort_while_waiting(false, 0);
    abort_while_waiting(true, 0);
    abort_while_waiting(true, 1);
}

/* The one that closes its group fails its own operations; its peers, waiting for it, must hear of it. */
static void close_while_in_flight(bool shared, uint32_t submit_every)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, shared);
    struct call *call = make_call(0, 1);
    struct job peer = {.team = &team,
                       .rank = 1,
                       .rounds = 3, /* the first may still succeed */
                       .submit_every = submit_every,
                       .expected = CL_EABORTED,
                       .timeout_us = PATIENCE_US};
    struct draft draft = {.rank = 1, .world_size = 2}; /* a plan that only waits, so that rank 1's is not fulfilled */
    if (shared)
        draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 0, .message = 1}, DRAFT_NONE);
    else
        draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT}, DRAFT_NONE);
    cl_plan_release(team.plans[1]);
    team.plans[1] = draft_finish(&draft);
    draft = (struct draft){.rank = 0, .world_size = 2};
    if (shared)
        draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1, .message = 1}, DRAFT_NONE);
    else
        draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .peer = 1, .target = CL_OUTPUT}, DRAFT_NONE);
    cl_plan_release(team.plans[0]);
    team.plans[0] = draft_finish(&draft);
    pthread_create(&peer.thread, NULL, work, &peer);
    cl_operation *operations[3];
    for (size_t i = 0; i < 3; i++)
        CHECK_EQ(submit_call(&team, 0, call, PATIENCE_US, &operations[i]), CL_OK);
    CHECK_EQ(cl_operation_notify(operations[1], 7), CL_EAGAIN);
    usleep(10000);
    cl_group_close(team.groups[0]);
    team.groups[0] = NULL;
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(cl_operation_wait(operations[i], 0), CL_ECLOSED);
        cl_operation_release(operations[i]);
    }
    struct cl_event event;
    CHECK_EQ(cl_engine_events(world.engines[0], &event, 1, PATIENCE_US), 1);
    CHECK_EQ(event.token, 7);
    CHECK_EQ(event.status, CL_ECLOSED);
    free(call);
    pthread_join(peer.thread, NULL);
    close_team(&team);
    close_world(&world);
}

static void test_close_while_in_flight(void)
{
    close_while_in_flight(false, 1);
    close_while_in_flight(true, 1);
    close_while_in_flight(true, 0);
}

/* Operations that have ended here but not there: closing must not disturb them. */
static void test_close_after_the_last_operation(void)
{
    for (uint32_t round = 0; round < 10; round++) {
        struct world world = open_world(2, "mem", LOSS_PPM);
        struct team team = open_team(&world, 1, round % 4 == 3);
        struct job peer = {.team = &team, .rank = 1, .rounds = 1, .timeout_us = PATIENCE_US};
        pthread_create(&peer.thread, NULL, work, &peer);
        struct call *call = make_call(0, 1);
        CHECK_EQ(run_call(&team, 0, call, PATIENCE_US), CL_OK);
        check_call(call, 2, 1);
        free(call);
        cl_engine_close(world.engines[0]); /* with its group */
        team.groups[0] = NULL;
        pthread_join(peer.thread, NULL);
        cl_group_close(team.groups[1]);
        cl_engine_close(world.engines[1]);
        cl_plan_release(team.plans[0]);
        cl_plan_release(team.plans[1]);
    }
}

/* One thread is inside cl_run, in the lane, when another closes the group. */
static void test_close_under_a_caller(void)
{
    for (int round = 0; round < 20; round++) {
        struct world world = open_world(2, "none", 0);
        struct team team = open_team(&world, 1, true);
        struct job caller = {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ECLOSED, .timeout_us = PATIENCE_US};
        pthread_create(&caller.thread, NULL, work, &caller);
        for (bool inside = false; !inside;) {
            pthread_mutex_lock(&team.groups[0]->lane);
            inside = team.groups[0]->lane_taken;
            pthread_mutex_unlock(&team.groups[0]->lane);
        }
        cl_group_close(team.groups[0]);
        team.groups[0] = NULL;
        pthread_join(caller.thread, NULL);
        close_team(&team);
        close_world(&world);
    }
}

static void test_deaths(void)
{
    struct world world = open_world(4, "none", 0);
    struct team team = open_team(&world, 1, true);
    pid_t children[2];
    for (uint16_t i = 0; i < 2; i++) {
        children[i] = fork();
        if (children[i] == 0)
            for (;;)
                pause();
        CHECK_EQ(cl_engine_watch_process(world.engines[0], (uint16_t)(1 + i), children[i]), CL_OK);
    }
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 1, children[0]), CL_OK); /* once is enough */
    struct job job = {.team = &team, .rank = 0, .rounds = 1, .expected = CL_EPEERLOST, .timeout_us = PATIENCE_US};
    struct job other = {
        .team = &team, .rank = 3, .rounds = 1, .submit_every = 1, .expected = CL_EPEERLOST, .timeout_us = PATIENCE_US};
    pthread_create(&other.thread, NULL, work, &other);
    for (size_t i = 0; i < 2; i++) /* both are dead before anybody looks: neither may hide the other */
        kill(children[i], SIGKILL);
    for (size_t i = 0; i < 2; i++)
        CHECK_EQ(waitpid(children[i], NULL, 0), children[i]);
    usleep(10000);
    run_jobs(&job, 1); /* waits for rank 1 first */
    pthread_join(other.thread, NULL);
    uint32_t culprit = 9;
    CHECK_EQ(cl_group_status(team.groups[0], &culprit), CL_EPEERLOST);
    CHECK_EQ(culprit, 1);
    struct team second = open_team(&world, 2, true); /* of a group that is made later, the dead are no members either */
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 1, children[0]), CL_OK);
    job.team = &second;
    run_jobs(&job, 1);
    close_team(&team);
    close_team(&second);
    close_world(&world);
}

/* A peer on the network that says no more: everybody learns which. */
static void test_silence(void)
{
    struct world world = open_world(3, "mem", 0);
    struct team team = open_team(&world, 1, false);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++)
        jobs[rank] = (struct job){.team = &team, .rank = rank, .rounds = 1, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 3);
    for (uint32_t rank = 0; rank < 2; rank++) {
        jobs[rank].expected = CL_EPEERLOST;
        pthread_create(&jobs[rank].thread, NULL, work, &jobs[rank]);
    }
    usleep(10000);
    struct cl_engine *finder = world.engines[0]; /* what its endpoint finds after seconds of silence */
    pthread_mutex_lock(&finder->core);
    cl_endpoint_peer_lost(finder->endpoint, 2);
    pthread_mutex_unlock(&finder->core);
    cl_engine_wake(finder);
    uint32_t culprits[2] = {9, 9};
    for (uint32_t rank = 0; rank < 2; rank++) {
        pthread_join(jobs[rank].thread, NULL);
        CHECK_EQ(cl_group_status(team.groups[rank], &culprits[rank]), CL_EPEERLOST);
    }
    CHECK_EQ(culprits[0], 2);
    CHECK_EQ(culprits[1], UINT32_MAX); /* it knows from rank 0 that a peer is lost, and rank 0 is not */
    close_team(&team);
    close_world(&world);
}

static void test_mismatch(void)
{
    struct world world = open_world(3, "mem", 0);
    struct team team = open_team(&world, 1, false);
    cl_plan_release(team.plans[1]);
    team.plans[1] = draft_exchange(1, 3, 4 * WORDS - 400);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++)
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 1, .expected = CL_EMISMATCH, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 3);
    close_team(&team);
    close_world(&world);
}

/* ---- a wire that is full at the wrong moment ---- */

static struct {
    atomic_bool full[2]; /* by engine: the sender (0) and the receiver (1) */
    atomic_bool stuck;   /* the sender has a packet with payload it could not hand over */
    _Atomic(const uint8_t *) freed;
    atomic_uint of_freed; /* packets that still named freed memory */
} jam;
static struct cl_wire_type jammed[2];

static size_t send_or_not(size_t engine, struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    const uint8_t *freed = atomic_load(&jam.freed);
    for (size_t i = 0; i < count; i++) {
        if (freed != NULL && datagrams[i].payload == freed)
            atomic_fetch_add(&jam.of_freed, 1);
        if (engine == 0 && atomic_load(&jam.full[0]) && datagrams[i].payload_length > 0)
            atomic_store(&jam.stuck, true);
    }
    if (atomic_load(&jam.full[engine]))
        return 0;
    size_t sent = cl_wire_mem.send(wire, datagrams, count);
    if (engine == 0 && datagrams[0].payload_length > 0)
        atomic_store(&jam.full[0], true); /* the message is out; what comes next is a repetition */
    return sent;
}

static size_t send_0(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    return send_or_not(0, wire, datagrams, count);
}

static size_t send_1(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    return send_or_not(1, wire, datagrams, count);
}

/* The acknowledgement comes while a repetition still waits for room: after it, the buffer belongs to the caller, and
 * the repetition must not be read from it any more. */
static void test_repetition_stuck_in_a_full_wire(void)
{
    struct world world = open_world(2, "mem", 0);
    jammed[0] = jammed[1] = cl_wire_mem;
    jammed[0].send = send_0;
    jammed[1].send = send_1;
    for (size_t i = 0; i < 2; i++) {
        pthread_mutex_lock(&world.engines[i]->core);
        world.engines[i]->wire_type = &jammed[i];
        pthread_mutex_unlock(&world.engines[i]->core);
    }
    struct team team = open_team(&world, 1, false);
    struct draft draft = {.world_size = 2, .input_bytes = 1000};
    draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = 1000}, DRAFT_NONE);
    cl_plan *sender = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 2, .output_bytes = 1000};
    draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 1000}, DRAFT_NONE);
    cl_plan *receiver = draft_finish(&draft);
    uint8_t *data = malloc(1000), target[1000];
    memset(data, 3, 1000);
    atomic_store(&jam.full[1], true); /* no acknowledgement yet */
    cl_operation *sent;
    CHECK_EQ(cl_submit(team.groups[0], sender, data, data, CL_U8, CL_SUM, 0, PATIENCE_US, &sent), CL_OK);
    CHECK_EQ(cl_run(team.groups[1], receiver, target, target, CL_U8, CL_SUM, 0, PATIENCE_US), CL_OK);
    CHECK_EQ(target[999], 3);
    while (!atomic_load(&jam.stuck))
        usleep(1000);
    atomic_store(&jam.full[1], false);
    CHECK_EQ(cl_operation_wait(sent, 0), CL_OK);
    cl_operation_release(sent);
    atomic_store(&jam.freed, data);
    free(data);
    atomic_store(&jam.full[0], false);
    cl_plan_release(sender);
    cl_plan_release(receiver);
    close_team(&team);
    close_world(&world);
    CHECK_EQ(atomic_load(&jam.of_freed), 0);
}

/* ---- what must not happen while nothing happens ---- */

static uint64_t cpu_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

enum { WATCH_US = 100000, WAKE_UPS_MAX = 50, CPU_MAX_US = WATCH_US / 4 };

/* No thread is busy while nothing happens: the engines' wake-ups over a while, counted. */
static void check_idle(const struct world *world)
{
    struct cl_engine_stats before[RANKS_MAX], after;
    for (uint32_t rank = 0; rank < world->size; rank++)
        cl_engine_read_stats(world->engines[rank], &before[rank]);
    usleep(WATCH_US);
    for (uint32_t rank = 0; rank < world->size; rank++) {
        cl_engine_read_stats(world->engines[rank], &after);
        CHECK(after.wakeups - before[rank].wakeups < WAKE_UPS_MAX);
        CHECK(after.receive_calls - before[rank].receive_calls < 10 * WAKE_UPS_MAX);
    }
}

static void test_idle_engines_sleep(void)
{
    static const char *const wires[] = {"mem", "udp", "none"};
    for (size_t i = 0; i < 3; i++) {
        struct world world = open_world(2, wires[i], 0);
        struct team team = open_team(&world, 1, i == 2);
        struct job jobs[2];
        for (uint32_t rank = 0; rank < 2; rank++)
            jobs[rank] = (struct job){.team = &team, .rank = rank, .rounds = 2, .timeout_us = PATIENCE_US};
        run_jobs(jobs, 2);
        check_idle(&world);
        close_team(&team);
        close_world(&world);
    }
}

/* Rank 0 waits for rank 1, which comes late: in the engine, or in the calling thread. */
static void wait_for_a_late_peer(const char *wire, bool shared, uint32_t submit_every)
{
    struct world world = open_world(2, wire, 0);
    struct team team = open_team(&world, 1, shared);
    struct job jobs[2];
    clockid_t clock;
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] = (struct job){
            .team = &team, .rank = rank, .rounds = 1, .submit_every = submit_every, .timeout_us = PATIENCE_US};
    pthread_create(&jobs[0].thread, NULL, work, &jobs[0]);
    usleep(20000);
    CHECK_EQ(pthread_getcpuclockid(jobs[0].thread, &clock), 0);
    uint64_t before = cpu_us(clock);
    check_idle(&world);
    CHECK(cpu_us(clock) - before < CPU_MAX_US);
    pthread_create(&jobs[1].thread, NULL, work, &jobs[1]);
    pthread_join(jobs[0].thread, NULL);
    pthread_join(jobs[1].thread, NULL);
    close_team(&team);
    close_world(&world);
}

static void test_waiting_threads_sleep(void)
{
    wait_for_a_late_peer("mem", false, 1);
    wait_for_a_late_peer("none", true, 1);
    wait_for_a_late_peer("none", true, 0);
}

/* The engine thread of rank 0 and the calling thread of rank 1 take turns thousands of times: one bell or wake-up that
 * is lost, and this takes as long as a sleep does. */
static void test_no_wake_up_is_lost(void)
{
    struct world world = open_world(2, "none", 0);
    struct team team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] = (struct job){
            .team = &team, .rank = rank, .rounds = 2000, .submit_every = 1 + rank, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2);
    close_team(&team);
    close_world(&world);
}

/* Everything a rank waits for is there before it calls, and nothing comes after: it must not wait for the next packet,
 * which is a heartbeat a second later. */
static void test_messages_that_came_early(void)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, false);
    for (uint32_t rank = 0; rank < 2; rank++)
        cl_plan_release(team.plans[rank]);
    struct draft draft = {.world_size = 2, .input_bytes = 4};
    draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = 4}, DRAFT_NONE);
    team.plans[0] = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 2, .output_bytes = 4};
    draft_add(&draft, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 4}, DRAFT_NONE);
    team.plans[1] = draft_finish(&draft);
    struct call *calls[2] = {make_call(0, 1), make_call(1, 1)};
    struct cl_engine_stats before, after;
    int quiet = 0; /* rounds in which no heartbeat came by chance */
    for (int round = 0; round < 5; round++) {
        CHECK_EQ(run_call(&team, 0, calls[0], PATIENCE_US), CL_OK); /* acknowledged: it is in rank 1's stash */
        cl_engine_read_stats(world.engines[1], &before);
        CHECK_EQ(run_call(&team, 1, calls[1], PATIENCE_US), CL_OK);
        cl_engine_read_stats(world.engines[1], &after);
        quiet += after.packets_received == before.packets_received;
        CHECK_EQ(calls[1]->output[0], calls[0]->input[0]);
    }
    CHECK(quiet > 0);
    free(calls[0]);
    free(calls[1]);
    close_team(&team);
    close_world(&world);
}

static size_t open_descriptors(void)
{
    size_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder != NULL && readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

static void test_open_and_close(void)
{
    size_t before = open_descriptors();
    for (int cycle = 0; cycle < 200; cycle++) {
        struct cl_engine_options options = options_of(cycle % 2 == 0 ? "udp" : "mem", 0);
        cl_engine *engine;
        CHECK_EQ(cl_engine_open(&options, &engine), CL_OK);
        if (cycle % 4 < 2) {
            CHECK_EQ(cl_engine_identify(engine, 1, 0, 0), CL_OK);
            CHECK_EQ(cl_engine_watch_process(engine, 1, getpid()), CL_OK);
        }
        struct world one = {.size = 1, .engines = {engine}};
        struct cl_group_options group = group_options(&one, 1, 0, -1);
        cl_group *unused;
        CHECK_EQ(cl_group_open(engine, &group, &unused), CL_OK);
        cl_engine_close(engine); /* and with it the group */
    }
    for (int cycle = 0; cycle < 10; cycle++) {
        struct world world = open_world(3, "mem", 0);
        struct team team = open_team(&world, 1, true), other = open_team(&world, 2, false);
        close_team(&other);
        close_team(&team);
        close_world(&world);
    }
    CHECK_EQ(open_descriptors(), before);
}

/* ---- bounded loss ---- */

struct lossy_call {
    struct team *team;
    uint32_t rank;
    uint64_t deadline_us;
    float input[WORDS], output[WORDS];
    cl_operation *operation;
};

static void *lossy_work(void *argument)
{
    struct lossy_call *call = argument;
    struct cl_qos qos = {.priority = 4, .loss_ppm = 500000, .deadline_us = call->deadline_us};
    CHECK_EQ(cl_submit_bounded(call->team->groups[call->rank], call->team->plans[call->rank], call->input, call->output,
                               CL_F32, CL_SUM, &qos, PATIENCE_US, &call->operation),
             CL_OK);
    CHECK_EQ(cl_operation_wait(call->operation, 0), CL_OK);
    return NULL;
}

/* What one rank says was not counted is what the other one's result lacks. */
static uint32_t check_lossy(const struct lossy_call *of, const struct lossy_call *at)
{
    struct cl_range ranges[16];
    int count = cl_operation_missing(of->operation, ranges, 16);
    CHECK(count >= 0 && count <= 16);
    uint32_t wrong = 0, missing = 0;
    for (uint32_t i = 0; i < WORDS; i++) {
        bool counted = true;
        for (int r = 0; r < count; r++)
            counted = counted && (4 * i < ranges[r].start || 4 * i >= ranges[r].end);
        missing += !counted;
        wrong += at->output[i] != at->input[i] + (counted ? of->input[i] : 0);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(cl_operation_stale(of->operation, ranges, 16), 0);
    return missing;
}

static void test_bounded_loss(void)
{
    struct world world = open_world(2, "mem", 100000);
    struct team team = open_team(&world, 1, false);
    uint32_t missing = 0;
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint32_t i = 0; i < team.plans[rank]->step_count; i++)
            if (team.plans[rank]->steps[i].kind <= CL_RECV_REDUCE)
                team.plans[rank]->steps[i].flags = CL_STEP_BOUNDED;
    for (uint32_t round = 0; round < 60; round++) {
        struct lossy_call calls[2] = {{.team = &team, .rank = 0}, {.team = &team, .rank = 1}};
        pthread_t threads[2];
        for (uint32_t rank = 0; rank < 2; rank++) {
            calls[rank].deadline_us = round % 3 == 0 ? 0 : UINT64_MAX; /* none, or that of the pace */
            for (uint32_t i = 0; i < WORDS; i++)
                calls[rank].input[i] = (float)(1 + rank + round + i);
            pthread_create(&threads[rank], NULL, lossy_work, &calls[rank]);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            pthread_join(threads[rank], NULL);
        for (uint32_t rank = 0; rank < 2; rank++)
            missing += check_lossy(&calls[rank], &calls[1 - rank]);
        for (uint32_t rank = 0; rank < 2; rank++)
            cl_operation_release(calls[rank].operation);
    }
    CHECK(missing > 0);
    struct cl_engine_stats stats;
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &stats), CL_OK);
    CHECK(stats.packets_given_up > 0);
    CHECK(stats.messages_stopped > 0);
    close_team(&team);
    close_world(&world);
}

static void test_bounds_that_are_refused(void)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, false);
    uint64_t map = 0;
    struct cl_qos good = {.loss_ppm = 1000}, much = {.loss_ppm = CL_LOSS_PPM_MAX + 1}, odd = {.loss_ppm = 1},
                  map_of_nothing = {.loss_ppm = 1, .protect = &map}, class_8 = {.loss_ppm = 1, .priority = 8};
    odd.treatment = CL_ZERO + 1;
    const struct {
        const struct cl_qos *qos;
        int dtype, op;
    } BAD[] = {{&good, CL_I32, CL_SUM}, {&good, CL_F32, CL_MAX},           {&much, CL_F32, CL_SUM},
               {&odd, CL_F32, CL_SUM},  {&map_of_nothing, CL_F32, CL_SUM}, {&class_8, CL_F32, CL_SUM},
               {NULL, CL_F32, CL_SUM}};
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        cl_operation *operation = NULL;
        CHECK_EQ(cl_submit_bounded(team.groups[0], team.plans[0], &map, &map, BAD[i].dtype, BAD[i].op, BAD[i].qos,
                                   PATIENCE_US, &operation),
                 CL_EINVAL);
        CHECK(operation == NULL);
    }
    close_team(&team);
    close_world(&world);
}

int main(void)
{
    RUN(test_mem);
    RUN(test_mem_with_loss);
    RUN(test_udp);
    RUN(test_shared_memory);
    RUN(test_mixed_hosts);
    RUN(test_alone);
    RUN(test_many_threads);
    RUN(test_many_in_flight);
    RUN(test_counters_wrap);
    RUN(test_a_turn_that_comes_late);
    RUN(test_events);
    RUN(test_many_events);
    RUN(test_bad_arguments);
    RUN(test_open_errors);
    RUN(test_timeout);
    RUN(test_longest_timeout);
    RUN(test_no_result_from_a_rank_that_failed);
    RUN(test_no_memory);
    RUN(test_lost_bells);
    RUN(test_abort);
    RUN(test_close_while_in_flight);
    RUN(test_close_after_the_last_operation);
    RUN(test_close_under_a_caller);
    RUN(test_deaths);
    RUN(test_silence);
    RUN(test_mismatch);
    RUN(test_repetition_stuck_in_a_full_wire);
    RUN(test_idle_engines_sleep);
    RUN(test_waiting_threads_sleep);
    RUN(test_no_wake_up_is_lost);
    RUN(test_messages_that_came_early);
    RUN(test_open_and_close);
    RUN(test_bounded_loss);
    RUN(test_bounds_that_are_refused);
    return CHECK_REPORT();
}
