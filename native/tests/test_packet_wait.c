/* Calling threads that wait for packets, and poll the sockets meanwhile. */
#include "engine/packet_wait.h"
#include "tests/waiters.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { HANG_US = 5000000 /* what takes so long would last for ever */ };

/* ---- a UDP wire that tests look at ---- */

static _Thread_local uint32_t own_sends; /* calls of `send` in this thread */
static atomic_bool refuses;              /* there is no room */

static size_t send_watched(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    own_sends++;
    return atomic_load(&refuses) ? 0 : cl_wire_udp.send(wire, datagrams, count);
}

static void watch(const struct world *world, uint32_t rank)
{
    static struct cl_wire_type type;
    cl_engine *engine = world->engines[rank];
    pthread_mutex_lock(&engine->core);
    type = cl_wire_udp;
    type.send = send_watched;
    engine->ports.wire_type = &type;
    pthread_mutex_unlock(&engine->core);
}

/* ---- a thread that polls ---- */

static bool polls(const struct world *world, uint32_t rank)
{
    return atomic_load(&world->engines[rank]->ports_taken);
}

/* The next wait of a rank begins as if another one had just ended. A lost wake-up shows: it sleeps on. */
static void keep_polling(const struct world *world, uint32_t rank)
{
    struct cl_packet_wait *wait = world->engines[rank]->packet_wait;
    wait->sleep_most_us = UINT64_MAX;
    atomic_store(&wait->ended_us, UINT64_MAX / 2);
}

/* Whether a thread polls the sockets, or is about to. Mostly: amid a long turn of the engine's thread, as on a busy
 * machine, it leaves them. */
static bool await_polling(const struct world *world, uint32_t rank)
{
    uint64_t start_us = cl_now_us();
    while (!polls(world, rank) && cl_now_us() - start_us < 100000)
        usleep(100);
    return polls(world, rank);
}

/* Waits for a message of one byte in another thread, which mostly polls the sockets once this returns. */
static void start_waiter(struct waiter *waiter, struct team *team, uint32_t rank, uint8_t *target)
{
    keep_polling(team->world, rank);
    waiter->operation = start_receive(team, rank, 1 - rank, 1, target, 1, PATIENCE_US);
    waiter->timeout_us = waiter->timeout_us > 0 ? waiter->timeout_us : HANG_US;
    pthread_create(&waiter->thread, NULL, wait_for, waiter);
    await_polling(team->world, rank);
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
    while (polls(world, rank) && !atomic_load(&world->engines[rank]->leaves_ports) &&
           cl_now_us() - start_us < PATIENCE_US)
        usleep(100);
    CHECK(!polls(world, rank) || atomic_load(&world->engines[rank]->leaves_ports));
}

/* Polls the sockets of a rank, as far as its engine's thread can see. */
static void take_ports(const struct world *world, uint32_t rank)
{
    atomic_store(&world->engines[rank]->ports_taken, true);
    await_leaving(world, rank);
}

/* Whether the engine's thread polls the sockets, or will by then. */
static bool returns(const struct world *world, uint32_t rank, uint64_t soon_us)
{
    cl_engine *engine = world->engines[rank];
    pthread_mutex_lock(&engine->core);
    bool soon = !atomic_load(&engine->leaves_ports) || engine->sleeps_until_us <= cl_now_us() + soon_us;
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
        CHECK(returns(&world, 0, 1000));
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
        if (first == 0)
            CHECK(!polls(&world, 0));
        CHECK_EQ(finish(start_send(&team, 1, 0, 2 - first, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(first == 0 ? &other : &one, CL_OK);
    }
}

TEST(test_many_threads_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    check_echoes(&team);
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
    bool polled[WAYS] = {false};
    for (uint32_t round = 0; round < 5 * WAYS; round++) {
        uint32_t way = round % WAYS;
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0;
        struct waiter waiter = {0};
        keep_polling(&world, 0);
        waiter.operation = start_receive(&team, 0, 1, 1, &in, 1, way == TIMEOUT ? 100000 : PATIENCE_US);
        waiter.timeout_us = HANG_US;
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        polled[way] |= await_polling(&world, 0);
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
    for (uint32_t way = 0; way < WAYS; way++)
        CHECK(polled[way]);
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

static void wait_until_done(cl_operation *operation)
{
    for (uint64_t start_us = cl_now_us(); cl_now_us() - start_us < HANG_US; usleep(200))
        if (cl_operation_status(operation) != CL_EAGAIN)
            return;
}

/* Nobody polls for an operation in flight: the engine's thread soon does, whether it began before or after the wait. */
TEST(test_operation_that_nobody_waits_for)
{
    enum { SOON_US = 100 };
    for (uint32_t round = 0; round < 10; round++) {
        bool before = round % 2 == 0;
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0, out = 1;
        cl_operation *receive = NULL;
        take_ports(&world, 0);
        if (before)
            receive = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
        CHECK(!cl_engine_take_ports_turn(world.engines[0], 0, NULL, true));
        if (!before)
            receive = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
        CHECK(returns(&world, 0, SOON_US));
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        wait_until_done(receive);
        CHECK_EQ(finish(receive), CL_OK);
    }
}

/* A calling thread does not wait for room: the engine's does, whether the port was full before or gets full meanwhile.
 */
TEST(test_full_port_while_polling)
{
    for (uint32_t before = 0; before < 2; before++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0, out = 7;
        cl_operation *receive = start_receive(&team, 1, 0, 1, &in, 1, PATIENCE_US);
        watch(&world, 0);
        if (before == 0)
            take_ports(&world, 0);
        atomic_store(&refuses, true);
        cl_operation *send = start_send(&team, 0, 1, 1, &out, 1, PATIENCE_US);
        usleep(1000);
        if (before == 1)
            atomic_store(&world.engines[0]->ports_taken, true);
        usleep(1000);
        atomic_store(&refuses, false);
        CHECK_EQ(cl_operation_wait(receive, HANG_US), CL_OK);
        atomic_store(&world.engines[0]->ports_taken, false);
        cl_engine_wake(world.engines[0]);
        CHECK_EQ(finish(receive), CL_OK);
        CHECK_EQ(finish(send), CL_OK);
        CHECK_EQ(in, 7);
    }
}

/* A thread that stops polling wakes the engine's if others wait, or a port is full; else that one sleeps on. The
 * engine's thread may wake by itself, and take the ring or cause one: then the attempt tells nothing. */
TEST(test_sockets_go_back_at_once)
{
    enum { ALONE, OTHERS, FULL, WAYS, ATTEMPTS = 20 };
    int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (uint32_t way = 0; way < WAYS; way++) {
        bool seen = false;
        for (uint32_t attempt = 0; attempt < ATTEMPTS && !seen; attempt++) {
            SCOPED_WORLD world = open_world(2, "udp", 0);
            SCOPED_TEAM team = open_team(&world, 1, false);
            cl_engine *engine = world.engines[0];
            _Atomic uint32_t done = 0;
            uint8_t out = 1;
            eventfd_t rings;
            watch(&world, 0);
            take_ports(&world, 0);
            pthread_mutex_lock(&engine->core);
            int wake_fd = engine->wake_fd;
            engine->wake_fd = bell;
            pthread_mutex_unlock(&engine->core);
            atomic_store(&refuses, way == FULL);
            if (way == FULL)
                CHECK_EQ(finish(start_send(&team, 0, 1, 1, &out, 1, PATIENCE_US)), CL_OK);
            (void)eventfd_read(bell, &rings);
            CHECK(!cl_engine_take_ports_turn(engine, 0, way == FULL ? &done : NULL, way != OTHERS));
            CHECK(!polls(&world, 0));
            seen = (eventfd_read(bell, &rings) == 0) == (way != ALONE);
            atomic_store(&refuses, false);
            pthread_mutex_lock(&engine->core);
            engine->wake_fd = wake_fd;
            pthread_mutex_unlock(&engine->core);
            eventfd_write(bell, 1); /* the engine's thread may have gone to sleep on either */
            cl_engine_wake(engine);
        }
        CHECK(seen);
    }
    close(bell);
}

/* A thread that starts an operation looks at sockets that nobody polls. */
TEST(test_start_looks_at_the_sockets)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    cl_engine *engine = world.engines[0];
    uint8_t in = 0, out = 1;
    for (uint32_t round = 0; round < 5; round++) {
        struct pollfd port = {.fd = cl_wire_udp.descriptor(engine->ports.wire, 0), .events = POLLIN};
        cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        CHECK_EQ(finish(receive), CL_OK);
        usleep(20000);
        take_ports(&world, 0);
        atomic_store(&engine->ports_taken, false); /* which the engine's thread does not know */
        uint64_t before = atomic_load(&engine->receive_calls);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        CHECK_EQ(poll(&port, 1, HANG_US / 1000), 1);
        receive = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
        CHECK(atomic_load(&engine->receive_calls) > before);
        CHECK_EQ(finish(receive), CL_OK);
    }
}

/* The same words as many messages of 4 bytes, without a sum. */
static cl_plan *draft_messages(uint32_t rank, uint32_t messages)
{
    struct draft draft = {.rank = rank, .world_size = 2, .input_bytes = 4 * WORDS, .output_bytes = 4 * WORDS};
    for (uint32_t i = 0; i < messages; i++) {
        struct cl_step step = {.kind = CL_SEND, .peer = 1 - rank, .message = i, .length = 4};
        draft_add(&draft, step, DRAFT_NONE);
        step.kind = CL_RECV_COPY;
        step.target = CL_OUTPUT;
        draft_add(&draft, step, DRAFT_NONE);
    }
    return draft_finish(&draft);
}

/* A short collective leaves in the thread that submits it; not amid others, nor one of many messages. */
TEST(test_short_collectives)
{
    enum { ALONE, AMID_OTHERS, MANY_MESSAGES, WAYS, ROUNDS = 20, MESSAGES_OF_MANY = 9 };
    for (uint32_t way = 0; way < WAYS; way++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint32_t sends = 0;
        watch(&world, 0);
        for (uint32_t rank = 0; way == MANY_MESSAGES && rank < 2; rank++) {
            cl_plan_release(team.plans[rank]);
            team.plans[rank] = draft_messages(rank, MESSAGES_OF_MANY);
            CHECK(team.plans[rank] != NULL);
        }
        for (uint32_t round = 0; round < ROUNDS; round++) {
            uint8_t in = 0, out = 1;
            cl_operation *other = NULL, *operations[2];
            struct call *calls[2] = {make_call(0, round), make_call(1, round)};
            if (way == AMID_OTHERS)
                other = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
            uint32_t before = own_sends;
            CHECK_EQ(submit_call(&team, 0, calls[0], PATIENCE_US, &operations[0]), CL_OK);
            sends += own_sends - before;
            CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
            for (uint32_t rank = 0; rank < 2; rank++) {
                CHECK_EQ(finish(operations[rank]), CL_OK);
                if (way != MANY_MESSAGES)
                    check_call(calls[rank], 2, round);
                free(calls[rank]);
            }
            if (way == AMID_OTHERS) {
                CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
                CHECK_EQ(finish(other), CL_OK);
            }
        }
        CHECK_EQ(sends > 0, way == ALONE);
    }
}

/* A thread returns in time while another one is amid a long turn, which holds this lock. */
TEST(test_return_amid_a_turn)
{
    for (uint32_t polling = 0; polling < 2; polling++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0, out = 1;
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US), .timeout_us = 50000};
        keep_polling(&world, 0);
        if (polling == 0)
            pthread_mutex_lock(&world.engines[0]->core);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        if (polling == 1) {
            await_polling(&world, 0);
            pthread_mutex_lock(&world.engines[0]->core);
        }
        for (uint64_t start_us = cl_now_us(); cl_now_us() - start_us < HANG_US && !atomic_load(&waiter.returned);)
            usleep(1000);
        CHECK(atomic_load(&waiter.returned));
        pthread_mutex_unlock(&world.engines[0]->core);
        pthread_join(waiter.thread, NULL);
        CHECK_EQ(waiter.status, CL_EAGAIN);
        CHECK(!polls(&world, 0));
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        CHECK_EQ(finish(waiter.operation), CL_OK);
    }
}
