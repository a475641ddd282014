/* Awaited ranks of a host: their bells, and deaths. */
#include "group/awaited.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/world.h"

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
    group->host_flight[operation.turn.queue].first =
        &operation; /* as if just looked at, and not yet allowed to start */
    CHECK(!cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    atomic_bool *taken = &group->host_queues.queues[operation.turn.queue].taken;
    atomic_store(taken, true); /* a calling thread is before it, and wakes the engine when it leaves */
    CHECK(cl_group_arm_bells(group, cl_now_us(), &deadline_us));
    atomic_store(taken, false);
    group->host_flight[operation.turn.queue].first = NULL;
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_operation_free(&operation);
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

/* A process that is to be killed. */
static pid_t start_child(void)
{
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    return child;
}

TEST(test_deaths)
{
    SCOPED_WORLD world = open_world(4, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    pid_t children[2];
    for (uint16_t i = 0; i < 2; i++) {
        children[i] = start_child();
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

enum waits { WAITS_FOR_NONE, WAITS_AT_ONCE, WAITS_IN_TURN };

/* Posts, then waits for the other ranks: for all at once, for one after the other, or for none. */
static cl_plan *plan_of_waits(uint32_t rank, enum waits waits)
{
    struct draft draft = {.rank = rank, .world_size = 3, .staging_bytes = STAGING};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
    for (uint32_t other = 0; waits != WAITS_FOR_NONE && other < 3; other++) {
        if (other == rank)
            continue;
        uint32_t step = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = other, .message = 1}, last);
        last = waits == WAITS_IN_TURN ? step : last;
    }
    return draft_finish(&draft);
}

/* Runs operations of rank 1 until one of them fails, which is the `last` one. Rank 0 does not come, and rank 2 is dead.
 */
static void run_beside_a_death(enum waits waits, bool submits, uint32_t last)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    cl_plan_release(team.plans[1]);
    team.plans[1] = plan_of_waits(1, waits);
    pid_t child = start_child();
    CHECK_EQ(cl_engine_watch_process(world.engines[1], 2, child), CL_OK);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    struct call *call = make_call(1, 1);
    int status = CL_OK;
    uint32_t rounds = 0, culprit = 9;
    for (; status == CL_OK && rounds <= last; rounds++) {
        cl_operation *operation;
        if (submits) {
            CHECK_EQ(submit_call(&team, 1, call, PATIENCE_US, &operation), CL_OK);
            status = cl_operation_wait(operation, 0);
            cl_operation_release(operation);
        } else {
            status = run_call(&team, 1, call, PATIENCE_US);
        }
    }
    CHECK_EQ(rounds, last);
    CHECK_EQ(status, CL_EPEERLOST);
    CHECK_EQ(cl_group_status(team.groups[1], &culprit), CL_EPEERLOST);
    CHECK_EQ(culprit, 2);
    free(call);
}

/* The first rank that an operation waits for is only late. Another one that it waits for is dead: it does not wait
 * until the first one comes, or until its timeout. */
TEST(test_a_death_behind_a_late_rank)
{
    for (int submits = 0; submits < 2; submits++) {
        run_beside_a_death(WAITS_AT_ONCE, submits, 1);
        run_beside_a_death(WAITS_IN_TURN, submits, 1);
        run_beside_a_death(WAITS_FOR_NONE, submits, 3); /* the gate opens for two operations */
    }
}
