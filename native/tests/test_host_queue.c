/* Host queue: the order of operations in shared memory, the threads that run them, and what ends them. */
#include "tests/world.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Both 32-bit counters of a group's order pass zero in the middle. */
TEST(test_counters_wrap)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_group *group = team.groups[rank];
        group->sequence = UINT32_MAX - 10;
        group->host_queue.base = group->host_queue.previous_base = UINT32_MAX - 20;
        atomic_store(group->host_queue.counters[rank], UINT32_MAX - 20);
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 30, .submit_every = 2, .timeout_us = PATIENCE_US};
    }
    run_jobs(jobs, 2);
    CHECK(team.groups[0]->host_queue.base < 100);
}

/* A host operation waits for its turn, and the turn comes while the engine is about to sleep. */
TEST(test_a_turn_that_comes_late)
{
    SCOPED_WORLD world = open_world(1, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct cl_group *group = team.groups[0];
    SCOPED_PLAN *plan = draft_host_exchange(0, 1, 4, STAGING);
    uint32_t word = 1;
    struct cl_operation_request request = {.plan = plan, .input = &word, .output = &word, .dtype = CL_U32};
    struct cl_operation operation;
    CHECK_EQ(cl_group_request(group, &operation, &request, cl_now_us()), CL_OK);
    uint64_t deadline_us = UINT64_MAX;
    pthread_mutex_lock(&world.engines[0]->core);
    group->first = &operation; /* as if just looked at, and not yet allowed to start */
    CHECK(!cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    atomic_store(&group->host_queue.taken,
                 true); /* a calling thread is before it, and wakes the engine when it leaves */
    CHECK(cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    atomic_store(&group->host_queue.taken, false);
    group->first = NULL;
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_operation_free(&operation);
}

/* What a rank that gives up leaves behind must not look like a result to the others: here rank 1 waits for rank 0's
 * second post, while rank 0 waits for a third rank, in vain. */
TEST(test_no_result_from_a_rank_that_failed)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
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
}

/* Bells that nobody hears cost time, not the operation. */
TEST(test_lost_bells)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    memset(world.bells, 'x', sizeof world.bells);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 2, .submit_every = 1, .timeout_us = PATIENCE_US};
    run_jobs(jobs, 2);
}

/* One thread runs an operation in cl_run when another closes the group. */
TEST(test_close_under_a_caller)
{
    for (int round = 0; round < 20; round++) {
        SCOPED_WORLD world = open_world(2, "none", 0);
        SCOPED_TEAM team = open_team(&world, 1, true);
        struct job caller = {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ECLOSED, .timeout_us = PATIENCE_US};
        pthread_create(&caller.thread, NULL, work, &caller);
        while (!atomic_load(&team.groups[0]->host_queue.taken)) {
        }
        cl_group_close(team.groups[0]);
        team.groups[0] = NULL;
        pthread_join(caller.thread, NULL);
    }
}

TEST(test_deaths)
{
    SCOPED_WORLD world = open_world(4, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
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
    SCOPED_TEAM second = open_team(&world, 2, true); /* of a group that is made later, the dead are no members either */
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 1, children[0]), CL_OK);
    job.team = &second;
    run_jobs(&job, 1);
}
