/* Groups: collectives with threads as ranks, over memory that loses packets, over UDP on loopback and in shared memory;
 * and everything that can end them. */
#include "tests/world.h"

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

/* Every rank runs `rounds` calls, each with the right sum. */
static void exercise(uint32_t size, const char *wire, double loss, bool shared, uint32_t rounds)
{
    SCOPED_WORLD world = open_world(size, wire, loss);
    SCOPED_TEAM team = open_team(&world, 1, shared);
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
    CHECK(loss == 0 || stats.packets_retransmitted > 0);
}

TEST(test_mem)
{
    exercise(3, "mem", 0, false, 30);
}

TEST(test_mem_with_loss)
{
    exercise(3, "mem", LOSS, false, 60);
}

TEST(test_udp)
{
    exercise(4, "udp", 0, false, 30);
}

TEST(test_shared_memory)
{
    exercise(4, "none", 0, true, 100);
}

/* Two ranks share memory, the third is alone on its host: every rank's plan posts all the same. */
TEST(test_mixed_hosts)
{
    SCOPED_WORLD world = open_world(3, "mem", 0);
    SCOPED_TEAM team = {.world = &world};
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
}

TEST(test_alone)
{
    exercise(1, "none", 0, false, 3);
}

/* ---- many threads, many groups ---- */

TEST(test_many_threads)
{
    enum { TEAMS = 3, THREADS = 3, RANKS = 2 };
    SCOPED_WORLD world = open_world(RANKS, "mem", LOSS);
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
}

TEST(test_many_in_flight)
{
    enum { CALLS = 40, RANKS = 2 };
    for (int shared = 0; shared < 2; shared++) {
        SCOPED_WORLD world = open_world(RANKS, "mem", 0);
        SCOPED_TEAM team = open_team(&world, 1, shared);
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
    }
}

/* ---- failures ---- */

TEST(test_bad_arguments)
{
    struct world world = open_world(2, "mem", 0);
    struct team team = open_team(&world, 1, false);
    struct call *call = make_call(0, 1);
    cl_operation *operation;
    cl_plan *host = draft_host_exchange(0, 2, 4, STAGING);
    const struct cl_operation_request good = request_of(&team, 0, call, 0);
    struct cl_operation_request request;
    CHECK_EQ(cl_submit(team.groups[0], &good, NULL), CL_EINVAL);
    CHECK_EQ(cl_submit(team.groups[0], NULL, &operation), CL_EINVAL);
    CHECK_EQ(cl_submit(NULL, &good, &operation), CL_EINVAL);
#define SUBMIT_REFUSED(change)                                                                                         \
    do {                                                                                                               \
        request = good;                                                                                                \
        change;                                                                                                        \
        CHECK_EQ(cl_submit(team.groups[0], &request, &operation), CL_EINVAL);                                          \
        CHECK_EQ(cl_run(team.groups[0], &request), CL_EINVAL);                                                         \
    } while (0)
    SUBMIT_REFUSED(request.plan = team.plans[1]);
    SUBMIT_REFUSED(request.plan = NULL);
    SUBMIT_REFUSED(request.plan = host);
    SUBMIT_REFUSED(request.dtype = 99);
    SUBMIT_REFUSED(request.dtype = -1);
    SUBMIT_REFUSED(request.op = 99);
    SUBMIT_REFUSED(request.op = -1);
    SUBMIT_REFUSED(request.qos.priority = CL_CLASS_YIELDS + 1);
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

/* Rank 0 calls, nobody else does. */
static void time_out(bool shared, bool here)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
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
    int status = run_call(&team, 1, call, PATIENCE_US);
    CHECK(status == CL_EABORTED || (status == CL_OK && !shared)); /* it had all that it needs, before it heard of it */
    CHECK_EQ(submit_call(&team, 1, call, PATIENCE_US, &operation), CL_OK);
    CHECK_EQ(cl_operation_wait(operation, 0), CL_EABORTED);
    cl_operation_release(operation);
    free(call);
}

TEST(test_timeout)
{
    time_out(false, true);
    time_out(false, false);
    time_out(true, true);
    time_out(true, false);
}

TEST(test_longest_timeout)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job first = {.team = &team, .rank = 0, .rounds = 1, .timeout_us = UINT64_MAX};
    struct job second = {.team = &team, .rank = 1, .rounds = 1, .timeout_us = PATIENCE_US};
    pthread_create(&first.thread, NULL, work, &first);
    usleep(10000);
    run_jobs(&second, 1);
    pthread_join(first.thread, NULL);
}

/* One rank has no memory for its operation: the others must not wait for it. */
TEST(test_no_memory)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct draft draft = {.world_size = 2, .scratch_bytes = UINT64_MAX / 4};
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .message = 1}, DRAFT_NONE);
    cl_plan_release(team.plans[0]);
    team.plans[0] = draft_finish(&draft);
    struct job jobs[] = {
        {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ENOMEM, .timeout_us = PATIENCE_US},
        {.team = &team, .rank = 1, .rounds = 1, .expected = CL_EABORTED, .timeout_us = PATIENCE_US},
    };
    run_jobs(jobs, 2);
}

/* All ranks but the last are inside an operation when one of them aborts. */
static void abort_while_waiting(bool shared, uint32_t submit_every)
{
    SCOPED_WORLD world = open_world(4, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
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
}

TEST(test_abort)
{
    abort_while_waiting(false, 0);
    abort_while_waiting(true, 0);
    abort_while_waiting(true, 1);
}

/* The one that closes its group fails its own operations; its peers, waiting for it, must hear of it. */
static void close_while_in_flight(bool shared, uint32_t submit_every)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
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
}

TEST(test_close_while_in_flight)
{
    close_while_in_flight(false, 1);
    close_while_in_flight(true, 1);
    close_while_in_flight(true, 0);
}

/* Operations that have ended here but not there: closing must not disturb them. */
TEST(test_close_after_the_last_operation)
{
    for (uint32_t round = 0; round < 10; round++) {
        struct world world = open_world(2, "mem", LOSS);
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

/* A peer on the network that says no more: everybody learns which. */
TEST(test_silence)
{
    SCOPED_WORLD world = open_world(3, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
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
    CHECK_EQ(culprits[1], 2); /* rank 0 has told it */
}

TEST(test_mismatch)
{
    SCOPED_WORLD world = open_world(3, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    cl_plan_release(team.plans[1]);
    team.plans[1] = draft_exchange(1, 3, 4 * WORDS - 400);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++)
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 1, .expected = CL_EMISMATCH, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 3);
}

/* Calls of one shape that are not the same: only their signatures tell them apart. */
static void check_signatures(bool shared)
{
    SCOPED_WORLD world = open_world(3, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++) {
        team.plans[rank]->signature = 77;
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 5, .submit_every = 2, .timeout_us = PATIENCE_US};
    }
    run_jobs(jobs, 3);
    team.plans[1]->signature = 78;
    for (uint32_t rank = 0; rank < 3; rank++)
        jobs[rank].expected = CL_EMISMATCH;
    run_jobs(jobs, 3);
    uint32_t culprit = 9;
    CHECK_EQ(cl_group_status(team.groups[1], &culprit), CL_EMISMATCH);
    CHECK(culprit < 3);
}

TEST(test_signatures)
{
    check_signatures(false);
    check_signatures(true);
}
