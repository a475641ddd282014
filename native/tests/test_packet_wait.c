/* Calling threads that wait for packets, and poll the sockets meanwhile. */
#include "engine/packet_wait.h"
#include "tests/waiters.h"

#include <sys/eventfd.h>
#include <unistd.h>

static bool polls(const struct world *world, uint32_t rank)
{
    return atomic_load(&world->engines[rank]->ports_taken);
}

/* The next wait of a rank begins as if another one had just ended. */
static void keep_polling(const struct world *world, uint32_t rank)
{
    atomic_store(&world->engines[rank]->packet_wait->ended_us, UINT64_MAX / 2);
}

static void await_polling(const struct world *world, uint32_t rank, bool expected)
{
    uint64_t start_us = cl_now_us();
    while (polls(world, rank) != expected && cl_now_us() - start_us < PATIENCE_US)
        usleep(100);
    CHECK_EQ(polls(world, rank), expected);
}

/* Waits for a message of one byte in another thread, which polls the sockets once this returns. */
static void start_waiter(struct waiter *waiter, struct team *team, uint32_t rank, uint8_t *target)
{
    keep_polling(team->world, rank);
    waiter->operation = start_receive(team, rank, 1 - rank, 1, target, 1, PATIENCE_US);
    pthread_create(&waiter->thread, NULL, wait_for, waiter);
    await_polling(team->world, rank, true);
}

static void end_waiter(struct waiter *waiter, int expected)
{
    pthread_join(waiter->thread, NULL);
    CHECK_EQ(waiter->status, expected);
    CHECK_EQ(finish(waiter->operation), expected);
}

static void await_leaving(const struct world *world, uint32_t rank)
{
    uint64_t start_us = cl_now_us();
    cl_engine_wake(world->engines[rank]);
    while (!atomic_load(&world->engines[rank]->leaves_ports) && cl_now_us() - start_us < PATIENCE_US)
        usleep(100);
    CHECK(atomic_load(&world->engines[rank]->leaves_ports));
}

/* Whether the engine's thread polls the sockets, or will soon. */
static bool returns(const struct world *world, uint32_t rank)
{
    enum { SOON_US = 1000 };
    cl_engine *engine = world->engines[rank];
    pthread_mutex_lock(&engine->core);
    bool soon = !atomic_load(&engine->leaves_ports) || engine->sleeps_until_us <= cl_now_us() + SOON_US;
    pthread_mutex_unlock(&engine->core);
    return soon;
}

/* Nobody waits for the second message: the engine's thread receives it. */
TEST(test_engine_gets_the_sockets_back)
{
    enum { ROUNDS = 20 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint8_t out[2] = {1, 2}, in[2] = {0};
        struct waiter waiter = {0};
        cl_operation *second = start_receive(&team, 0, 1, 2, &in[1], 1, PATIENCE_US);
        start_waiter(&waiter, &team, 0, &in[0]);
        await_leaving(&world, 0);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out[0], 1, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
        CHECK(!polls(&world, 0));
        CHECK(returns(&world, 0));
        CHECK_EQ(finish(start_send(&team, 1, 0, 2, &out[1], 1, PATIENCE_US)), CL_OK);
        uint64_t start_us = cl_now_us();
        while (cl_operation_status(second) == CL_EAGAIN && cl_now_us() - start_us < PATIENCE_US)
            usleep(200);
        CHECK_EQ(cl_operation_status(second), CL_OK);
        CHECK_EQ(finish(second), CL_OK);
        CHECK_EQ(in[0] + in[1], 3);
    }
}

/* The thread that waits first polls, and receives the message of the other one, too; then it leaves. */
TEST(test_two_threads_wait)
{
    for (uint32_t first = 0; first < 2; first++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t out = 1, in[2] = {0};
        struct waiter one = {0}, other = {.operation = start_receive(&team, 0, 1, 2, &in[1], 1, PATIENCE_US)};
        start_waiter(&one, &team, 0, &in[0]);
        pthread_create(&other.thread, NULL, wait_for, &other);
        usleep(2000);
        CHECK_EQ(finish(start_send(&team, 1, 0, first + 1, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(first == 0 ? &one : &other, CL_OK);
        CHECK_EQ(polls(&world, 0), first == 1);
        CHECK_EQ(finish(start_send(&team, 1, 0, 2 - first, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(first == 0 ? &other : &one, CL_OK);
    }
}

TEST(test_many_threads_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct talk talks[2 * THREADS];
    start_echoes(&team, talks);
    for (uint32_t i = 0; i < 2 * THREADS; i++) {
        pthread_join(talks[i].thread, NULL);
        CHECK_EQ(talks[i].status, CL_OK);
    }
}

/* Collectives of both kinds: those that wait within their call, and those that are waited for later. */
TEST(test_collectives)
{
    SCOPED_WORLD world = open_world(3, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++)
        jobs[rank] = (struct job){.team = &team,
                                  .rank = rank,
                                  .rounds = 200,
                                  .submit_every = 2,
                                  .expected = CL_OK,
                                  .timeout_us = PATIENCE_US};
    run_jobs(jobs, 3);
}

/* Other threads end the operation: by its timeout, an abort, or the end of the group or of the engine. */
TEST(test_end_while_polling)
{
    enum { TIMEOUT, ABORT, CLOSE_GROUP, CLOSE_ENGINE, WAYS };
    static const int EXPECTED[WAYS] = {CL_ETIMEDOUT, CL_EABORTED, CL_ECLOSED, CL_ECLOSED};
    for (uint32_t round = 0; round < 5 * WAYS; round++) {
        uint32_t way = round % WAYS;
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0;
        struct waiter waiter = {0};
        keep_polling(&world, 0);
        waiter.operation = start_receive(&team, 0, 1, 1, &in, 1, way == TIMEOUT ? 100000 : PATIENCE_US);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        await_polling(&world, 0, true);
        if (way == ABORT)
            cl_group_abort(team.groups[0], CL_EABORTED);
        if (way == CLOSE_GROUP)
            cl_group_close(team.groups[0]);
        if (way == CLOSE_ENGINE)
            cl_engine_close(world.engines[0]); /* with its groups */
        if (way == CLOSE_ENGINE)
            world.engines[0] = NULL;
        if (way == CLOSE_GROUP || way == CLOSE_ENGINE)
            team.groups[0] = NULL;
        end_waiter(&waiter, EXPECTED[way]);
    }
}

/* The first wait after a pause leaves the sockets to the engine's thread, which polls them already. */
TEST(test_wait_after_a_pause)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t in = 0, out = 1;
    for (uint32_t round = 0; round < 5; round++) {
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US)};
        usleep(2000);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        usleep(2000);
        CHECK(!polls(&world, 0));
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
    }
}

/* Only the end of what a thread sleeps for ends its sleep. */
TEST(test_end_of_a_sleep)
{
    SCOPED_WORLD world = open_world(1, "udp", 0);
    struct cl_packet_wait *wait = world.engines[0]->packet_wait;
    _Atomic uint32_t word = 1, other = 1;
    eventfd_t rings = 0;
    atomic_store(&wait->sleeps_for, &word);
    cl_packet_wait_end(wait, &other);
    CHECK_EQ(eventfd_read(wait->wake_fd, &rings), -1);
    cl_packet_wait_end(wait, &word);
    CHECK_EQ(eventfd_read(wait->wake_fd, &rings), 0);
    CHECK_EQ(rings, 1);
}

/* A wait with a timeout ends in time, and its operation can be waited for again. */
TEST(test_timeout_of_a_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint32_t in = 0, out = 7;
    cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 4, PATIENCE_US);
    keep_polling(&world, 0);
    CHECK_EQ(cl_operation_wait(receive, 20000), CL_EAGAIN);
    CHECK(!polls(&world, 0));
    CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 4, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish(receive), CL_OK);
    CHECK_EQ(in, 7);
}

/* What comes in bulk goes back to the engine's thread, and arrives. */
TEST(test_bulk)
{
    enum { LARGE = 16 << 20 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t *data = calloc(1, LARGE), *target = calloc(1, LARGE);
    memset(data, 5, LARGE);
    for (uint32_t round = 0; round < 3; round++) {
        memset(target, 0, LARGE);
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, target, LARGE, PATIENCE_US)};
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, data, LARGE, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
        CHECK_EQ(memcmp(data, target, LARGE), 0);
    }
    free(data);
    free(target);
}

/* The port gets another socket while a thread polls the former one. */
TEST(test_moved_port)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    static const char *const address = "127.0.0.1";
    static const uint32_t first = 0;
    uint8_t out = 1, in = 0;
    uint32_t port;
    struct waiter waiter = {0};
    start_waiter(&waiter, &team, 0, &in);
    struct cl_engine_stats before, after;
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &before), CL_OK);
    CHECK_EQ(cl_engine_move_port(world.engines[0], 0, address), CL_OK);
    usleep(10000);
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &after), CL_OK);
    CHECK(after.receive_calls - before.receive_calls < 10); /* it sleeps, on the new one */
    CHECK_EQ(cl_engine_port(world.engines[0], 0, &port), CL_OK);
    struct cl_peer_options options = {
        .peer = 0, .path_count = 1, .local = &first, .remote_addresses = &address, .remote_ports = &port};
    CHECK_EQ(cl_engine_add_peer(world.engines[1], &options), CL_OK);
    CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
    end_waiter(&waiter, CL_OK);
    CHECK_EQ(in, 1);
}
