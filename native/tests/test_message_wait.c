/* Calling threads that wait for messages through shared memory. */
#include "tests/waiters.h"

#include <unistd.h>

/* A thread whose message has come hands the rest of the work to the engine at once. */
TEST(test_other_operations_go_on)
{
    enum { LARGE = 8 << 20, ROUNDS = 10 }; /* under TSan, more would take longer than a lost wake-up */
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint8_t *data = calloc(1, LARGE), *target = calloc(1, LARGE), small[2] = {1};
    uint32_t early = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
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
    CHECK(early >= ROUNDS / 2); /* a lost wake-up costs CL_SLEEP_MAX_US */
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

/* ... even while the waiting thread moves another message. */
TEST(test_timeout_amid_bulk)
{
    enum { LARGE = 512 << 20, TIMEOUT_US = 30000 };
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint8_t *data = calloc(1, LARGE), *target = calloc(1, LARGE), small[2] = {1};
    struct waiter waiter = {.operation = start_receive(&team, 0, 1, 1, &small[1], 1, PATIENCE_US),
                            .timeout_us = TIMEOUT_US};
    cl_operation *large_in = start_receive(&team, 0, 1, 2, target, LARGE, PATIENCE_US);
    pthread_create(&waiter.thread, NULL, wait_for, &waiter);
    usleep(TIMEOUT_US / 3);
    cl_operation *large_out = start_send(&team, 1, 0, 2, data, LARGE, PATIENCE_US);
    pthread_join(waiter.thread, NULL);
    CHECK_EQ(waiter.status, CL_EAGAIN);
    CHECK_EQ(cl_operation_status(large_in), CL_EAGAIN);
    cl_operation *small_out = start_send(&team, 1, 0, 1, small, 1, PATIENCE_US);
    CHECK_EQ(finish(large_in), CL_OK);
    CHECK_EQ(finish(large_out), CL_OK);
    CHECK_EQ(finish(small_out), CL_OK);
    CHECK_EQ(finish(waiter.operation), CL_OK);
    free(data);
    free(target);
}
