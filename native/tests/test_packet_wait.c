/* Calling threads that wait for packets, and poll the sockets meanwhile. */
#include "engine/packet_wait.h"
#include "protocol/endpoint_state.h"
#include "tests/waiters.h"
#include "tests/watched_wire.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- a thread that polls ---- */

static bool polls(const struct world *world, uint32_t rank)
{
    return atomic_load(&world->engines[rank]->ports_taken);
}

/* The next wait of a rank begins as if another one had just ended, or (apart) after a pause. A lost wake-up shows: it
 * sleeps on. */
static void prepare_wait(const struct world *world, uint32_t rank, bool apart)
{
    struct cl_packet_wait *wait = world->engines[rank]->packet_wait;
    wait->sleep_most_us = UINT64_MAX;
    atomic_store(&wait->ended_us, apart ? 0 : UINT64_MAX / 2);
}

/* Whether the engine's thread would sleep without the sockets. */
static bool is_left_out(const cl_engine *engine)
{
    return !atomic_load(&engine->port_set.on);
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
    prepare_wait(team->world, rank, false);
    waiter->operation = start_receive(team, rank, 1 - rank, 1, target, 1, PATIENCE_US);
    waiter->timeout_us = waiter->timeout_us > 0 ? waiter->timeout_us : 2 * HANG_US;
    pthread_create(&waiter->thread, NULL, wait_for, waiter);
    await_polling(team->world, rank);
}

static void end_waiter(struct waiter *waiter, int expected)
{
    await_return(waiter);
    CHECK(atomic_load(&waiter->returned)); /* else it waits for its own timeout */
    pthread_join(waiter->thread, NULL);
    CHECK_EQ(waiter->status, expected);
    CHECK_EQ(finish(waiter->operation), expected);
}

/* The engine's thread holds core from when it takes the ring until it sleeps again. */
static void await_leaving(const struct world *world, uint32_t rank)
{
    cl_engine *engine = world->engines[rank];
    struct pollfd rings = {.fd = engine->wake_fd, .events = POLLIN};
    uint64_t start_us = cl_now_us();
    cl_engine_wake(engine);
    while (polls(world, rank) && (!is_left_out(engine) || poll(&rings, 1, 0) > 0) &&
           cl_now_us() - start_us < PATIENCE_US)
        usleep(100);
    CHECK(!polls(world, rank) || is_left_out(engine));
}

/* Polls the sockets of a rank, as far as its engine's thread can see. */
static void take_ports(const struct world *world, uint32_t rank)
{
    atomic_store(&world->engines[rank]->ports_taken, true);
    await_leaving(world, rank);
}

/* Whether the engine's thread polls the sockets, or will by then, or at once because it has been woken. It is asked for
 * as long: the thread may just be about to see that it has the ports again. */
static bool returns(const struct world *world, uint32_t rank, uint64_t soon_us)
{
    cl_engine *engine = world->engines[rank];
    struct pollfd rings = {.fd = engine->wake_fd, .events = POLLIN};
    uint64_t start_us = cl_now_us();
    bool soon;
    do {
        pthread_mutex_lock(&engine->core);
        soon = !is_left_out(engine) || engine->sleeps_until_us <= cl_now_us() + soon_us || poll(&rings, 1, 0) > 0;
        pthread_mutex_unlock(&engine->core);
    } while (!soon && cl_now_us() - start_us < soon_us);
    return soon;
}

/* False: it does not sleep, because it had to leave the sockets to the engine's thread. */
static bool await_sleep(const struct cl_packet_wait *wait)
{
    uint64_t start_us = cl_now_us();
    while (atomic_load(&wait->sleeps_for) == NULL && atomic_load(&wait->engine->ports_taken) &&
           cl_now_us() - start_us < PATIENCE_US)
        usleep(100);
    return atomic_load(&wait->sleeps_for) != NULL;
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
        while (atomic_load(&world.engines[0]->packet_wait->sleepers) == 0)
            usleep(200);
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
    for (uint32_t round = 0; round < 100 * WAYS; round++) {
        uint32_t way = round % WAYS;
        if (round >= 5 * WAYS && polled[way])
            continue; /* beside load, a thread may have to try often before it polls */
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0;
        struct waiter waiter = {0};
        prepare_wait(&world, 0, false);
        waiter.operation = start_receive(&team, 0, 1, 1, &in, 1, way == TIMEOUT ? 100000 : PATIENCE_US);
        waiter.timeout_us = 2 * HANG_US;
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        polled[way] |= await_polling(&world, 0);
        watch(&world, 0);
        atomic_store(&loses, true); /* no answer of rank 1 ends its sleep */
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
        atomic_store(&loses, false);
    }
    for (uint32_t way = 0; way < WAYS; way++)
        CHECK(polled[way]);
}

/* In the first wait after a pause a thread takes the sockets from the engine's, which sleeps on, and gives them back at
 * its end. If the engine's thread wakes for another reason, the attempt tells nothing. */
TEST(test_wait_after_a_pause)
{
    enum { ATTEMPTS = 20 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    cl_engine *engine = world.engines[0];
    bool seen = false;
    for (uint32_t attempt = 0; attempt < ATTEMPTS && !seen; attempt++) {
        uint8_t in = 0, out = 1;
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US),
                                .timeout_us = 2 * HANG_US};
        usleep(20000); /* the engine's thread goes to sleep, with the sockets */
        uint64_t before = atomic_load(&engine->wakeups);
        prepare_wait(&world, 0, true);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        seen = await_polling(&world, 0) && await_sleep(engine->packet_wait) && is_left_out(engine);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
        seen = seen && !is_left_out(engine) && atomic_load(&engine->wakeups) == before;
    }
    CHECK(seen);
}

/* Only the end of what a thread sleeps for ends its sleep, or a new socket. */
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
    cl_packet_wait_move(wait, 0, atomic_load(&wait->port_fds[0]));
    CHECK_EQ(eventfd_read(wait->wake_fd, &rings), 0);
}

/* A wait with a timeout ends in time, and its operation can be waited for again. */
TEST(test_timeout_of_a_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint32_t in = 0, out = 7;
    cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 4, PATIENCE_US);
    prepare_wait(&world, 0, false);
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

/* Nor is its end missed, which no packet brings. */
TEST(test_timeout_of_an_operation_that_nobody_waits_for)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", 30 * (uint64_t)PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t in = 0;
    usleep(20000); /* the engine's thread goes to sleep, for long */
    cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 1, 50000);
    wait_until_done(receive);
    CHECK_EQ(cl_operation_status(receive), CL_ETIMEDOUT);
    CHECK_EQ(finish(receive), CL_ETIMEDOUT);
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

/* Rings for the engine's thread go there from now on. Returns where they went before. */
static int redirect_rings(cl_engine *engine, int fd)
{
    pthread_mutex_lock(&engine->core);
    int former = engine->wake_fd;
    engine->wake_fd = fd;
    pthread_mutex_unlock(&engine->core);
    return former;
}

/* Packets have come and will come in bulk, as far as the engine knows. */
static void pretend_bulk(cl_engine *engine)
{
    uint64_t later_us = cl_now_us() + HANG_US;
    pthread_mutex_lock(&engine->core);
    engine->nap = (struct cl_nap){.begun = true, .batched_us = later_us, .last_us = later_us, .spacing_us = 1};
    engine->endpoint->lacking = 1000;
    pthread_mutex_unlock(&engine->core);
}

/* Starts more operations than two turns do, and leaves them to the next turns. */
static void start_many(struct team *team)
{
    enum { OPERATIONS = 3 * CL_STARTS_BUDGET, MESSAGES_EACH = 17 /* too many for the calling thread: see submit.c */ };
    static uint32_t target;
    struct draft draft = {.world_size = 2, .output_bytes = sizeof target};
    for (uint32_t i = 0; i < MESSAGES_EACH; i++)
        draft_add(&draft,
                  (struct cl_step){
                      .kind = CL_RECV_COPY, .peer = 1, .target = CL_OUTPUT, .message = i, .length = sizeof target},
                  DRAFT_NONE);
    struct cl_operation_request request = {
        .plan = draft_finish(&draft), .output = &target, .dtype = CL_U8, .timeout_us = PATIENCE_US};
    for (uint32_t i = 0; i < OPERATIONS; i++) {
        cl_operation *operation;
        CHECK_EQ(cl_submit(team->groups[0], &request, &operation), CL_OK);
        cl_operation_release(operation);
    }
    cl_plan_release(request.plan);
}

/* A thread that stops polling wakes the engine's if a port is full, packets come in bulk, or there is more to do; else
 * that one sleeps on, with the sockets if others wait or this wait came after a pause. The engine's thread may wake by
 * itself, and take the ring or cause one: then the attempt tells nothing. */
TEST(test_sockets_go_back_at_once)
{
    enum { ALONE, OTHERS, APART, FULL, BULK, MORE, WAYS, ATTEMPTS = 20 };
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
            bool stays = false;
            watch(&world, 0);
            take_ports(&world, 0);
            int wake_fd = redirect_rings(engine, bell);
            atomic_store(&refuses, way == FULL);
            if (way == FULL)
                CHECK_EQ(finish(start_send(&team, 0, 1, 1, &out, 1, PATIENCE_US)), CL_OK);
            if (way == BULK)
                pretend_bulk(engine);
            if (way == MORE)
                start_many(&team);
            (void)eventfd_read(bell, &rings);
            bool idle = way == ALONE || way == OTHERS || way == APART, left_out = way == ALONE;
            if (idle) {
                prepare_wait(&world, 0, way == APART);
                atomic_store(&engine->packet_wait->sleepers, way == OTHERS);
                atomic_store(&engine->ports_taken, false); /* which the engine's thread does not know */
                cl_packet_wait_for(engine->packet_wait, &done, cl_now_us() + 1000);
                atomic_store(&engine->packet_wait->sleepers, 0);
            } else {
                stays = cl_engine_take_ports_turn(engine, way == BULK || way == MORE, &done, true);
            }
            seen = !stays && !polls(&world, 0) && (eventfd_read(bell, &rings) == 0) == !idle &&
                   (!idle || is_left_out(engine) == left_out);
            atomic_store(&refuses, false);
            atomic_store(&engine->ports_taken, false);
            redirect_rings(engine, wake_fd);
            eventfd_write(bell, 1); /* the engine's thread may have gone to sleep on either */
            cl_engine_wake(engine);
        }
        CHECK(seen);
    }
    close(bell);
}

/* The engine's thread keeps the sockets while it naps, as it does when packets come in bulk; after a pause also while
 * it is awake. */
TEST(test_sockets_stay_with_the_thread)
{
    enum { ATTEMPTS = 20 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    cl_engine *engine = world.engines[0];
    bool napped = false;
    for (uint32_t attempt = 0; attempt < ATTEMPTS && !napped; attempt++) {
        usleep(20000);
        pretend_bulk(engine);
        cl_engine_wake(engine); /* it naps after its turn, for 1 ms */
        uint64_t start_us = cl_now_us();
        while (!atomic_load(&engine->keeps_ports) && cl_now_us() - start_us < 10000)
            sched_yield();
        bool takes = cl_engine_take_ports(engine, false);
        napped = atomic_load(&engine->keeps_ports) && !takes && !polls(&world, 0);
        atomic_store(&engine->ports_taken, false);
        cl_engine_wake(engine);
    }
    CHECK(napped);
    usleep(20000);
    pthread_mutex_lock(&engine->core); /* as if it were awake */
    CHECK(!cl_engine_take_ports(engine, true) && !polls(&world, 0));
    CHECK(cl_engine_take_ports(engine, false) && polls(&world, 0));
    pthread_mutex_unlock(&engine->core);
    atomic_store(&engine->ports_taken, false);
    cl_engine_wake(engine);
}

/* The engine's thread sleeps on the sockets when a calling thread begins to poll them: it leaves that one the packets.
 * If it wakes for another reason, too, the attempt tells nothing. */
TEST(test_packets_are_for_the_thread_that_polls)
{
    enum { ATTEMPTS = 20 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    cl_engine *engine = world.engines[0];
    uint8_t in = 0, out = 1;
    bool seen = false;
    for (uint32_t attempt = 0; attempt < ATTEMPTS && !seen; attempt++) {
        cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
        usleep(20000);
        atomic_store(&engine->ports_taken, true);
        uint64_t before = atomic_load(&engine->receive_calls), start_us = cl_now_us();
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        while (!is_left_out(engine) && cl_now_us() - start_us < PATIENCE_US)
            usleep(100);
        CHECK(is_left_out(engine));
        seen = atomic_load(&engine->receive_calls) == before;
        atomic_store(&engine->ports_taken, false);
        cl_engine_wake(engine);
        CHECK_EQ(finish(receive), CL_OK);
    }
    CHECK(seen);
}

/* A thread that begins to poll puts the engine's thread off until its next turn. If it has to leave the sockets again,
 * the attempt tells nothing. */
TEST(test_engine_rests_while_a_thread_polls)
{
    enum { ATTEMPTS = 20 };
    bool told = false;
    for (uint32_t attempt = 0; attempt < ATTEMPTS && !told; attempt++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        cl_engine *engine = world.engines[0];
        uint8_t in = 0, out = 1;
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US),
                                .timeout_us = 2 * HANG_US};
        take_ports(&world, 0);
        pthread_mutex_lock(&engine->core);
        engine->sleeps_until_us = 1; /* as if after another wait */
        atomic_store(&engine->ports_taken, false);
        pthread_mutex_unlock(&engine->core);
        prepare_wait(&world, 0, false);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        await_polling(&world, 0);
        told = await_sleep(engine->packet_wait);
        pthread_mutex_lock(&engine->core);
        CHECK(!told || engine->sleeps_until_us == engine->due_us);
        pthread_mutex_unlock(&engine->core);
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
    }
    CHECK(told);
}

/* A ring that comes too late, for a former wait, is taken and ends no wait. After its end nobody rings any more, and
 * the next wait may poll. If the thread has to leave the sockets meanwhile, the attempt tells nothing. */
TEST(test_ring_for_a_former_wait)
{
    enum { ATTEMPTS = 20 };
    bool told = false;
    for (uint32_t attempt = 0; attempt < ATTEMPTS && !told; attempt++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        struct cl_packet_wait *wait = world.engines[0]->packet_wait;
        struct pollfd rings = {.fd = wait->wake_fd, .events = POLLIN};
        uint8_t in = 0, out = 1;
        struct waiter waiter = {0};
        start_waiter(&waiter, &team, 0, &in);
        told = await_sleep(wait);
        eventfd_write(wait->wake_fd, 1);
        uint64_t start_us = cl_now_us();
        while (poll(&rings, 1, 0) == 1 && polls(&world, 0) && cl_now_us() - start_us < HANG_US)
            usleep(100);
        told = told && polls(&world, 0);
        CHECK(!told || (poll(&rings, 1, 0) == 0 && !atomic_load(&waiter.returned)));
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        end_waiter(&waiter, CL_OK);
        CHECK(atomic_load(&wait->sleeps_for) == NULL);
        CHECK(atomic_load(&wait->ended_us) >= start_us && atomic_load(&wait->ended_us) <= cl_now_us());
    }
    CHECK(told);
}

/* A thread that comes late does not touch the engine, which may be gone. */
TEST(test_wait_after_the_end)
{
    SCOPED_WORLD world = open_world(1, "udp", 0);
    struct cl_packet_wait *wait = world.engines[0]->packet_wait;
    _Atomic uint32_t done = 0;
    prepare_wait(&world, 0, false);
    cl_packet_wait_close(wait);
    wait->engine = NULL;
    cl_packet_wait_for(wait, &done, UINT64_MAX);
    CHECK_EQ(atomic_load(&wait->inside), 0);
}

/* The engine's thread repeats what a calling thread has sent. */
TEST(test_packets_of_calling_threads_are_lost)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t in = 0, out = 7;
    cl_operation *receive = start_receive(&team, 1, 0, 1, &in, 1, PATIENCE_US);
    watch(&world, 0);
    usleep(20000);
    uint32_t before = own_sends;
    atomic_store(&loses, true);
    cl_operation *send = start_send(&team, 0, 1, 1, &out, 1, PATIENCE_US);
    atomic_store(&loses, false);
    CHECK(own_sends > before);
    CHECK_EQ(cl_operation_wait(receive, HANG_US), CL_OK);
    CHECK_EQ(finish(receive), CL_OK);
    CHECK_EQ(finish(send), CL_OK);
    CHECK_EQ(in, 7);
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

/* A thread returns in time while another one is amid a long turn, which holds this lock. */
TEST(test_return_amid_a_turn)
{
    for (uint32_t polling = 0; polling < 2; polling++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        uint8_t in = 0, out = 1;
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US), .timeout_us = 50000};
        prepare_wait(&world, 0, false);
        if (polling == 0)
            pthread_mutex_lock(&world.engines[0]->core);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        if (polling == 1) {
            await_polling(&world, 0);
            pthread_mutex_lock(&world.engines[0]->core);
        }
        await_return(&waiter);
        CHECK(atomic_load(&waiter.returned));
        pthread_mutex_unlock(&world.engines[0]->core);
        pthread_join(waiter.thread, NULL);
        CHECK_EQ(waiter.status, CL_EAGAIN);
        CHECK(!polls(&world, 0));
        CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
        CHECK_EQ(finish(waiter.operation), CL_OK);
    }
}
