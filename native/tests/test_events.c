/* Events: their order, and who waits for how long. */
#include "engine/events.h"
#include "tests/check.h"

enum { PATIENCE_US = 20000000, MANY = 1000 };

TEST(test_order_survives_growth)
{
    SCOPED(cl_events_free) struct cl_events events;
    struct cl_event out[64];
    uint64_t pushed = 0, taken = 0;
    cl_events_init(&events);
    while (taken < MANY) {
        for (int i = 0; i < 100 && pushed < MANY; i++, pushed++) /* more than are taken: the ring wraps, and grows */
            cl_events_push(&events, pushed, -(int)(pushed % 7));
        int count = cl_events_take(&events, out, 64, PATIENCE_US);
        CHECK(count > 0);
        for (int i = 0; i < count; i++, taken++) {
            CHECK_EQ(out[i].token, taken);
            CHECK_EQ(out[i].status, -(int)(taken % 7));
        }
    }
    CHECK_EQ(cl_events_take(&events, out, 64, 0), 0);
}

TEST(test_nothing_is_lost_by_stopping)
{
    SCOPED(cl_events_free) struct cl_events events;
    struct cl_event out[4];
    cl_events_init(&events);
    CHECK_EQ(cl_events_take(&events, out, 4, 1000), 0);
    cl_events_push(&events, 5, CL_OK);
    cl_events_stop(&events);
    CHECK_EQ(cl_events_take(&events, out, 4, PATIENCE_US), 1);
    CHECK_EQ(out[0].token, 5);
    CHECK_EQ(cl_events_take(&events, out, 4, PATIENCE_US), CL_ECLOSED);
    cl_events_push(&events, 6, CL_OK); /* nobody takes it: freed all the same */
}

static void *take_until_stopped(void *argument)
{
    struct cl_event out[4];
    uint64_t taken = 0;
    for (int count; (count = cl_events_take(argument, out, 4, PATIENCE_US)) != CL_ECLOSED;) {
        CHECK(count > 0);
        for (int i = 0; i < count; i++)
            CHECK_EQ(out[i].token, taken++);
    }
    CHECK_EQ(taken, MANY);
    return NULL;
}

TEST(test_between_threads)
{
    SCOPED(cl_events_free) struct cl_events events;
    pthread_t taker;
    cl_events_init(&events);
    CHECK_EQ(pthread_create(&taker, NULL, take_until_stopped, &events), 0);
    for (uint64_t token = 0; token < MANY; token++)
        cl_events_push(&events, token, CL_OK);
    cl_events_stop(&events);
    pthread_join(taker, NULL);
}
