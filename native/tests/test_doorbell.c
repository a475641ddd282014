/* Doorbells: who must be woken how. */
#include "os/doorbell.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "engine/clock.h"
#include "tests/check.h"

TEST(test_the_bell_is_for_engines_that_listen)
{
    struct cl_doorbell doorbell = {0};
    CHECK(!cl_doorbell_ring(&doorbell, true)); /* the engine has not gone to sleep since it was woken */
    doorbell.wish = CL_DOORBELL_REQUESTS;
    CHECK(!cl_doorbell_ring(&doorbell, false));
    CHECK(cl_doorbell_ring(&doorbell, true));
    CHECK(!cl_doorbell_ring(&doorbell, true)); /* once */
    doorbell.wish = CL_DOORBELL_ALL;
    CHECK(cl_doorbell_ring(&doorbell, false));
    doorbell.wish = CL_DOORBELL_ALL;
    doorbell.attendants = 1;
    CHECK(!cl_doorbell_ring(&doorbell, true)); /* a thread looks at it */
    CHECK_EQ(doorbell.rings, 6);
    CHECK_EQ(doorbell.requests, 4);
}

static void *ring_for_messages(void *argument)
{
    struct cl_doorbell *doorbell = argument;
    while (atomic_load(&doorbell->sleepers) == 0)
        cl_doorbell_ring(doorbell, false);
    return NULL;
}

/* An engine that listened to all, and now to requests only, must hear of the next request. */
TEST(test_a_message_takes_no_wish_for_requests)
{
    struct cl_doorbell doorbell = {0};
    pthread_t thread;
    uint32_t lost = 0;
    pthread_create(&thread, NULL, ring_for_messages, &doorbell);
    for (uint32_t round = 0; round < 20000; round++) {
        atomic_store(&doorbell.wish, CL_DOORBELL_ALL);
        for (uint32_t i = 0; i < round % 50; i++)
            atomic_load(&doorbell.sleepers);
        atomic_store(&doorbell.wish, CL_DOORBELL_REQUESTS);
        uint32_t rings = atomic_load(&doorbell.rings);
        while (atomic_load(&doorbell.rings) - rings < 2) /* the call that saw the former wish has ended */
            sched_yield();
        lost += atomic_load(&doorbell.wish) != CL_DOORBELL_REQUESTS;
    }
    atomic_store(&doorbell.sleepers, 1);
    pthread_join(thread, NULL);
    CHECK_EQ(lost, 0);
}

enum { PATIENCE_US = 20000000 };

struct sleeper {
    struct cl_doorbell *doorbell;
    _Atomic uint32_t done;
    pthread_t thread;
};

static void *sleep_there(void *argument)
{
    struct sleeper *sleeper = argument;
    while (atomic_load(&sleeper->doorbell->rings) == 0 && atomic_load(&sleeper->done) == 0)
        cl_doorbell_sleep(sleeper->doorbell, 0, &sleeper->done, PATIENCE_US);
    return NULL;
}

/* A ring wakes a thread that sleeps, and so does the end of what it waits for; neither is lost on a thread that is just
 * about to sleep. */
TEST(test_no_wake_up_is_lost)
{
    uint64_t start_us = cl_now_us();
    for (uint32_t round = 0; round < 2000; round++) {
        struct cl_doorbell doorbell = {.wish = CL_DOORBELL_ALL};
        struct sleeper sleeper = {.doorbell = &doorbell};
        pthread_create(&sleeper.thread, NULL, sleep_there, &sleeper);
        for (uint32_t i = 0; i < round % 50 * 10; i++)
            atomic_load(&doorbell.sleepers);
        if (round % 2 == 0) {
            cl_doorbell_ring(&doorbell, false);
        } else {
            atomic_store(&sleeper.done, 1);
            cl_doorbell_wake(&doorbell);
        }
        pthread_join(sleeper.thread, NULL);
        CHECK_EQ(doorbell.sleepers, 0);
    }
    CHECK(cl_now_us() - start_us < PATIENCE_US);
}

TEST(test_a_timeout)
{
    struct cl_doorbell doorbell = {0};
    _Atomic uint32_t done = 0;
    uint64_t start_us = cl_now_us();
    cl_doorbell_sleep(&doorbell, 0, &done, 20000);
    CHECK(cl_now_us() - start_us >= 19000);
    start_us = cl_now_us();
    cl_doorbell_sleep(&doorbell, 7, &done, PATIENCE_US);
    done = 1;
    cl_doorbell_sleep(&doorbell, 0, &done, PATIENCE_US);
    CHECK(cl_now_us() - start_us < PATIENCE_US / 2);
}
