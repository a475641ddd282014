/* Members: the counters of a group whose rank 0 is late, in shared memory and over packets. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/world.h"

enum { LATE_US = 1000, ROUNDS = 3, LATE_RANK = 0 };

struct late_job {
    struct team *team;
    uint32_t rank;
    uint32_t rounds;
    bool submits;           /* the engine thread runs the operations, instead of the calling thread */
    atomic_uint *rounds_of; /* the rounds that the ranks have begun */
    pthread_t thread;
};

/* Waits until the other ranks have called, and await rank 0 alone: it is the last one then, however busy the machine.
 */
static void wait_for_others(const struct team *team)
{
    uint64_t end_us = cl_now_us() + PATIENCE_US;
    for (uint32_t rank = 1; rank < 3; rank++)
        for (uint8_t awaited[3] = {0}; (!awaited[LATE_RANK] || awaited[3 - rank]) && cl_now_us() < end_us; usleep(100))
            CHECK_EQ(cl_group_awaited(team->groups[rank], awaited), CL_OK);
    CHECK(cl_now_us() < end_us);
}

/* The late rank may end a round early, while the others still wait for what it has sent in that. */
static void wait_for_round(const struct late_job *job, uint32_t round)
{
    uint64_t end_us = cl_now_us() + PATIENCE_US;
    for (uint32_t rank = 1; rank < 3; rank++)
        while (atomic_load(&job->rounds_of[rank]) < round && cl_now_us() < end_us)
            usleep(100);
}

static void *work_late(void *argument)
{
    struct late_job *job = argument;
    for (uint32_t round = 1; round <= job->rounds; round++) {
        struct call *call = make_call(job->rank, round);
        atomic_store(&job->rounds_of[job->rank], round);
        if (job->rank == LATE_RANK) {
            wait_for_round(job, round);
            wait_for_others(job->team);
            usleep(LATE_US);
        }
        if (job->submits) {
            cl_operation *operation;
            CHECK_EQ(submit_call(job->team, job->rank, call, PATIENCE_US, &operation), CL_OK);
            CHECK_EQ(cl_operation_wait(operation, 0), CL_OK);
            cl_operation_release(operation);
        } else {
            CHECK_EQ(run_call(job->team, job->rank, call, PATIENCE_US), CL_OK);
        }
        free(call);
    }
    return NULL;
}

static void be_late(struct team *team, bool submits)
{
    struct late_job jobs[3];
    atomic_uint rounds_of[3] = {0};
    for (uint32_t rank = 0; rank < 3; rank++) {
        jobs[rank] =
            (struct late_job){.team = team, .rank = rank, .submits = submits, .rounds = ROUNDS, .rounds_of = rounds_of};
        pthread_create(&jobs[rank].thread, NULL, work_late, &jobs[rank]);
    }
    for (uint32_t rank = 0; rank < 3; rank++)
        pthread_join(jobs[rank].thread, NULL);
}

static void check_lags(struct team *team)
{
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct cl_lag lags[3];
        CHECK_EQ(cl_group_read_lags(team->groups[rank], lags, 3), 3);
        CHECK_EQ(lags[rank].last, 0); /* no rank waits for itself */
        uint64_t times = lags[0].last + lags[1].last + lags[2].last;
        CHECK(times <= ROUNDS);
        if (rank == LATE_RANK)
            continue;
        CHECK_EQ(lags[LATE_RANK].last, ROUNDS);
        CHECK(lags[LATE_RANK].waited_us >= ROUNDS * LATE_US);
        CHECK_EQ(lags[3 - rank].waited_us, 0);
    }
}

TEST(test_late_rank_is_named)
{
    for (int way = 0; way < 4; way++) {
        bool shared = way < 2;
        SCOPED_WORLD world = open_world(3, shared ? "none" : "mem", 0);
        SCOPED_TEAM team = open_team(&world, 1, shared);
        be_late(&team, way % 2 == 1);
        check_lags(&team);
    }
}

TEST(test_bytes_in_shared_memory_are_counted)
{
    for (int shared = 0; shared <= 1; shared++) {
        SCOPED_WORLD world = open_world(3, "mem", 0);
        SCOPED_TEAM team = open_team(&world, 1, shared);
        be_late(&team, false);
        for (uint32_t rank = 0; rank < 3; rank++) {
            struct cl_engine_stats stats;
            CHECK_EQ(cl_engine_read_stats(world.engines[rank], &stats), CL_OK);
            CHECK_EQ(stats.shared_bytes_received, shared ? team.plans[rank]->shared_bytes * ROUNDS : 0);
            CHECK(!shared || stats.shared_bytes_received >= (uint64_t)ROUNDS * 4 * WORDS);
            CHECK(shared || stats.payload_bytes_received > 0);
        }
    }
}

/* Rank 0 does not call: the others await it, and not each other. */
TEST(test_awaited_ranks_are_named)
{
    for (int way = 0; way < 3; way++) {
        bool shared = way<2, submits = way> 0;
        SCOPED_WORLD world = open_world(3, shared ? "none" : "mem", 0);
        SCOPED_TEAM team = open_team(&world, 1, shared);
        struct late_job jobs[3];
        atomic_uint rounds_of[3] = {0};
        uint8_t awaited[3] = {7, 7, 7};
        CHECK_EQ(cl_group_awaited(team.groups[1], awaited), CL_OK);
        CHECK_EQ(awaited[0] + awaited[1] + awaited[2], 0);
        for (uint32_t rank = 1; rank < 3; rank++) {
            jobs[rank] =
                (struct late_job){.team = &team, .rank = rank, .submits = submits, .rounds = 1, .rounds_of = rounds_of};
            pthread_create(&jobs[rank].thread, NULL, work_late, &jobs[rank]);
        }
        wait_for_others(&team);
        for (uint32_t rank = 1; rank < 3; rank++) {
            CHECK_EQ(cl_group_awaited(team.groups[rank], awaited), CL_OK);
            CHECK_EQ(awaited[0], 1);
            CHECK_EQ(awaited[1] + awaited[2], 0);
        }
        jobs[0] = (struct late_job){.team = &team, .submits = submits, .rounds = 1, .rounds_of = rounds_of};
        work_late(&jobs[0]);
        for (uint32_t rank = 1; rank < 3; rank++)
            pthread_join(jobs[rank].thread, NULL);
    }
}

/* A rank that is behind in shared memory is awaited only by an operation that needs its data. */
TEST(test_ranks_behind_are_not_awaited_by_nothing)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    const struct cl_host_queues *queues = &team.groups[1]->host_queues;
    atomic_uint *own = queues->queues[0].places[queues->self].counter;
    atomic_fetch_add(own, 1); /* as if this rank had just ended an operation, and the others read its staging still */
    uint8_t awaited[3] = {7, 7, 7};
    CHECK_EQ(cl_group_awaited(team.groups[1], awaited), CL_OK);
    CHECK_EQ(awaited[0] + awaited[1] + awaited[2], 0);
    atomic_fetch_sub(own, 1);
}

TEST(test_a_rank_that_closes_the_group_has_left)
{
    for (int shared = 0; shared < 2; shared++) {
        SCOPED_WORLD world = open_world(2, shared ? "none" : "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, shared);
        CHECK_EQ(cl_group_left(team.groups[0], 1), 0);
        cl_group_close(team.groups[1]);
        team.groups[1] = NULL;
        CHECK_EQ(cl_group_left(team.groups[0], 1), shared); /* other hosts do not tell */
        CHECK_EQ(cl_group_left(team.groups[0], 0), 0);
    }
}

TEST(test_capacity_is_kept)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct cl_lag lags[2] = {{7, 7}, {7, 7}};
    CHECK_EQ(cl_group_read_lags(team.groups[0], lags, 1), 2);
    CHECK_EQ(lags[0].last, 0);
    CHECK_EQ(lags[1].last, 7);
}

/* Two threads look at the process of rank 1, which is stopped; the time of one of them is older than the other's look.
 */
TEST(test_a_stopped_rank_is_gone_after_the_peer_timeout)
{
    enum { STEP_US = 150000 };
    SCOPED_WORLD world = open_world(2, "none", 0);
    int status;
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 1, child), CL_OK);
    SCOPED_TEAM team = open_team(&world, 1, true);
    const struct cl_group_io *io = &team.groups[0]->io;
    uint64_t start_us = cl_now_us(), stopped_us = start_us + STEP_US, now_us = stopped_us;
    CHECK(!io->is_gone(io->context, 1, start_us));
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    for (; now_us < stopped_us + 3000000; now_us += STEP_US) {
        CHECK(!io->is_gone(io->context, 1, now_us));
        CHECK(!io->is_gone(io->context, 1, now_us - 1));
    }
    CHECK(io->is_gone(io->context, 1, now_us));
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, &status, 0), child);
}
