/* Calling threads that wait for messages through shared memory. */
#include "engine/member.h"
#include "tests/waiters.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { BULK_BYTES = 64 << 20, BULK_MESSAGES = 256 };

/* A thread whose message has come hands the rest of the work to the engine at once. */
TEST(test_other_operations_go_on)
{
    enum { LARGE = 8 << 20, ENOUGH = 5, ROUNDS = 200 }; /* under TSan, more would take longer than a lost wake-up */
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint8_t *data = calloc(1, LARGE), *target = calloc(1, LARGE), small[2] = {1};
    uint32_t early = 0;
    for (uint32_t round = 0; round < ROUNDS && early < ENOUGH; round++) { /* beside load, many rounds are late */
        struct waiter waiter = {.operation = start_receive(&team, 1, 0, 1, &small[1], 1, PATIENCE_US)};
        cl_operation *large_in = start_receive(&team, 1, 0, 2, target, LARGE, PATIENCE_US);
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        usleep(2000);
        cl_operation *large_out = start_send(&team, 0, 1, 2, data, LARGE, PATIENCE_US);
        cl_operation *small_out = start_send(&team, 0, 1, 1, small, 1, PATIENCE_US);
        pthread_join(waiter.thread, NULL);
        CHECK_EQ(waiter.status, CL_OK);
        uint64_t start_us = cl_now_us();
        while (cl_operation_status(large_in) == CL_EAGAIN && cl_now_us() - start_us < PATIENCE_US)
            usleep(200);
        early += cl_now_us() - start_us < CL_SLEEP_MAX_US / 2;
        CHECK_EQ(finish(waiter.operation), CL_OK);
        CHECK_EQ(finish(large_in), CL_OK);
        CHECK_EQ(finish(large_out), CL_OK);
        CHECK_EQ(finish(small_out), CL_OK);
    }
    CHECK_EQ(early, ENOUGH); /* a lost wake-up costs CL_SLEEP_MAX_US in every round */
    free(data);
    free(target);
}

TEST(test_many_threads_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    check_echoes(&team);
}

/* Threads wait when another one closes the group, and one comes when it is closed. */
TEST(test_close_under_waiting_threads)
{
    for (uint32_t round = 0; round < 20; round++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, true);
        struct waiter waiters[THREADS] = {0};
        uint32_t words[THREADS + 1];
        for (uint32_t i = 0; i < THREADS; i++) {
            waiters[i].operation = start_receive(&team, 0, i % 2 == 0 ? 1 : UINT32_MAX, i, &words[i], 4, PATIENCE_US);
            pthread_create(&waiters[i].thread, NULL, wait_for, &waiters[i]);
        }
        cl_operation *late = start_receive(&team, 0, 1, THREADS, &words[THREADS], 4, PATIENCE_US);
        usleep(100 * round);
        cl_group_close(team.groups[0]);
        team.groups[0] = NULL;
        CHECK_EQ(finish(late), CL_ECLOSED);
        for (uint32_t i = 0; i < THREADS; i++) {
            pthread_join(waiters[i].thread, NULL);
            CHECK_EQ(waiters[i].status, CL_ECLOSED);
            cl_operation_release(waiters[i].operation);
        }
    }
}

/* A wait with a timeout ends in time, and its operation can be waited for again ... */
TEST(test_timeout_of_a_wait)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint32_t in = 0, out = 7;
    cl_operation *receive = start_receive(&team, 0, 1, 1, &in, 4, PATIENCE_US);
    CHECK_EQ(cl_operation_wait(receive, 20000), CL_EAGAIN);
    CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 4, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish(receive), CL_OK);
    CHECK_EQ(in, 7);
}

/* ... even while another thread is amid a long turn, which holds this lock, and messages have come: it wakes the
 * engine's thread, which moves them. */
TEST(test_return_amid_a_turn)
{
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    cl_engine *engine = world.engines[0];
    const struct cl_doorbell *doorbell = cl_member_of(team.groups[0])->message_wait->doorbell;
    uint8_t in[2] = {0}, out = 1;
    struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in[0], 1, PATIENCE_US), .timeout_us = 200000};
    pthread_mutex_lock(&engine->core);
    int wake_fd = engine->wake_fd, rings = engine->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_create(&waiter.thread, NULL, wait_for, &waiter);
    for (uint64_t start_us = cl_now_us(); atomic_load(&doorbell->attendants) == 0 && cl_now_us() - start_us < HANG_US;)
        usleep(100);
    CHECK_EQ(finish(start_send(&team, 1, 0, 2, &out, 1, PATIENCE_US)), CL_OK);
    await_return(&waiter);
    CHECK(atomic_load(&waiter.returned));
    eventfd_t count;
    CHECK_EQ(eventfd_read(rings, &count), 0);
    engine->wake_fd = wake_fd;
    pthread_mutex_unlock(&engine->core);
    pthread_join(waiter.thread, NULL);
    close(rings);
    CHECK_EQ(waiter.status, CL_EAGAIN);
    CHECK_EQ(finish(start_receive(&team, 0, 1, 2, &in[1], 1, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish(waiter.operation), CL_OK);
}

/* Messages to rank 0 that never end, as far as a test can see: it leaves them before. */
struct bulk {
    struct team *team;
    uint8_t *data, *target;
    cl_operation *in[BULK_MESSAGES], *out[BULK_MESSAGES];
};

static struct bulk await_bulk(struct team *team)
{
    struct bulk bulk = {team, calloc(1, BULK_BYTES), calloc(1, BULK_BYTES), {0}, {0}};
    for (uint32_t i = 0; i < BULK_MESSAGES; i++)
        bulk.in[i] = start_receive(team, 0, 1, 100 + i, bulk.target, BULK_BYTES, PATIENCE_US);
    return bulk;
}

static void send_bulk(struct bulk *bulk)
{
    for (uint32_t i = 0; i < BULK_MESSAGES; i++)
        bulk->out[i] = start_send(bulk->team, 1, 0, 100 + i, bulk->data, BULK_BYTES, PATIENCE_US);
}

/* Whether some of them have not come yet. */
static bool goes_on(const struct bulk *bulk)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < BULK_MESSAGES; i++)
        left += cl_operation_status(bulk->in[i]) == CL_EAGAIN;
    return left > 0;
}

/* Closes the groups, too. */
static void end_bulk(struct bulk *bulk)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        cl_group_close(bulk->team->groups[rank]);
        bulk->team->groups[rank] = NULL;
    }
    for (uint32_t i = 0; i < BULK_MESSAGES; i++) {
        finish(bulk->in[i]);
        finish(bulk->out[i]);
    }
    free(bulk->data);
    free(bulk->target);
}

/* An engine whose thread is kept asleep: rings for it and its timer go elsewhere. */
struct asleep {
    cl_engine *engine;
    int wake_fd, timer_fd;
};

static struct asleep keep_asleep(cl_engine *engine)
{
    usleep(20000); /* it has nothing to do, and goes to sleep */
    pthread_mutex_lock(&engine->core);
    struct asleep asleep = {engine, engine->wake_fd, engine->timer_fd};
    engine->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    pthread_mutex_unlock(&engine->core);
    return asleep;
}

static void let_wake(struct asleep *asleep)
{
    cl_engine *engine = asleep->engine;
    pthread_mutex_lock(&engine->core);
    int wake_fd = engine->wake_fd, timer_fd = engine->timer_fd;
    engine->wake_fd = asleep->wake_fd;
    engine->timer_fd = asleep->timer_fd;
    pthread_mutex_unlock(&engine->core);
    eventfd_write(wake_fd, 1); /* on a busy machine it sleeps there */
    cl_engine_wake(engine);
    close(wake_fd);
    close(timer_fd);
}

/* ... or it moves other messages itself. Once its own has come it returns as well, however much is left to move. */
TEST(test_return_amid_bulk)
{
    enum { TIMEOUT, END, WAYS };
    for (uint32_t way = 0; way < WAYS; way++) {
        SCOPED_WORLD world = open_patient_world(2, "udp", 30 * (uint64_t)PATIENCE_US);
        SCOPED_TEAM team = open_team(&world, 1, true);
        struct asleep asleep = keep_asleep(world.engines[0]);
        uint8_t in = 0, out = 1;
        struct bulk bulk = await_bulk(&team);
        struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US),
                                .timeout_us = way == TIMEOUT ? 50000 : PATIENCE_US};
        cl_operation *send = NULL;
        pthread_create(&waiter.thread, NULL, wait_for, &waiter);
        usleep(10000);
        send_bulk(&bulk);
        if (way == END)
            send = start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US);
        pthread_join(waiter.thread, NULL);
        CHECK_EQ(waiter.status, way == TIMEOUT ? CL_EAGAIN : CL_OK);
        CHECK(goes_on(&bulk));
        end_bulk(&bulk);
        let_wake(&asleep);
        CHECK_EQ(finish(waiter.operation), way == TIMEOUT ? CL_ECLOSED : CL_OK);
        if (send != NULL)
            CHECK_EQ(finish(send), CL_OK);
    }
}

struct word {
    struct cl_message_wait *wait;
    _Atomic uint32_t done;
};

static void *wait_for_word(void *argument)
{
    struct word *word = argument;
    cl_message_wait_for(word->wait, &word->done, cl_now_us() + PATIENCE_US);
    return NULL;
}

/* A request comes just when a thread stops waiting: too late for that one, and too early for the engine's bell. */
TEST(test_request_at_the_end_of_a_wait)
{
    enum { LARGE = 1 << 20 };
    SCOPED_WORLD world = open_patient_world(2, "udp", 30 * (uint64_t)PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct word word = {.wait = cl_member_of(team.groups[0])->message_wait};
    const struct cl_doorbell *doorbell = word.wait->doorbell;
    uint8_t *data = calloc(1, LARGE);
    pthread_t thread;
    word.wait->spins = false;
    usleep(20000); /* the group falls asleep */
    pthread_create(&thread, NULL, wait_for_word, &word);
    while (atomic_load(&doorbell->sleepers) == 0)
        usleep(100);
    atomic_store(&word.done, 1);
    cl_operation *send = start_send(&team, 1, 0, 1, data, LARGE, PATIENCE_US);
    pthread_join(thread, NULL);
    CHECK_EQ(cl_operation_wait(send, HANG_US), CL_OK); /* rank 0 keeps the message */
    cl_operation_release(send);
    free(data);
}
