/* Doorbells: who must be woken how. */
#include "os/doorbell.h"

#include <pthread.h>
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
