/* Submission: how a caller learns that an operation has ended. */
#include "tests/world.h"

TEST(test_events)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct call *calls[2] = {make_call(0, 1), make_call(1, 1)};
    cl_operation *operations[2];
    struct cl_event events[4];
    struct cl_operation_times none;
    uint64_t start_us = cl_now_us();
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, 1000), 0);
    CHECK_EQ(submit_call(&team, 0, calls[0], PATIENCE_US, &operations[0]), CL_OK);
    CHECK_EQ(cl_operation_status(operations[0]), CL_EAGAIN);
    CHECK_EQ(cl_operation_times(operations[0], &none), CL_EAGAIN);
    CHECK_EQ(cl_operation_times(operations[0], NULL), CL_EINVAL);
    CHECK_EQ(cl_operation_wait(operations[0], 1000), CL_EAGAIN);
    CHECK_EQ(cl_operation_notify(operations[0], 42), CL_EAGAIN);
    CHECK_EQ(cl_operation_notify(operations[0], 43), CL_EINVAL); /* one event, and the first token's */
    CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, PATIENCE_US), 1);
    CHECK_EQ(events[0].token, 42);
    CHECK_EQ(events[0].status, CL_OK);
    CHECK_EQ(cl_operation_wait(operations[1], 0), CL_OK);
    CHECK_EQ(cl_operation_notify(operations[1], 44), CL_OK); /* waited for: no event will come, not even a late one */
    CHECK_EQ(cl_engine_events(world.engines[1], events, 4, 1000), 0);
    for (size_t rank = 0; rank < 2; rank++) {
        struct cl_operation_times times;
        CHECK_EQ(cl_operation_times(operations[rank], &times), CL_OK);
        CHECK(start_us <= times.submitted_us && times.submitted_us <= times.first_us);
        CHECK(times.first_us <= times.ended_us && times.ended_us <= cl_now_us());
    }
    cl_engine_stop_events(world.engines[0]);
    CHECK_EQ(cl_engine_events(world.engines[0], events, 4, PATIENCE_US), CL_ECLOSED);
    for (size_t rank = 0; rank < 2; rank++) {
        cl_operation_release(operations[rank]);
        free(calls[rank]);
    }
}

/* A caller that has waited for an operation gets no event for it, however close to its end it asks. */
TEST(test_no_event_after_the_wait)
{
    SCOPED_WORLD world = open_world(1, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct call *call = make_call(0, 1);
    uint32_t late = 0;
    for (uint64_t token = 1; token <= 3000; token++) {
        cl_operation *operation;
        CHECK_EQ(submit_call(&team, 0, call, 0, &operation), CL_OK);
        while (cl_operation_status(operation) == CL_EAGAIN || cl_operation_wait(operation, 1) == CL_EAGAIN)
            ;
        late += cl_operation_notify(operation, token) != CL_OK;
        cl_operation_release(operation);
    }
    CHECK_EQ(late, 0);
    free(call);
}

/* The ring of events grows, and the engine closes while events are left in it. */
TEST(test_many_events)
{
    enum { CALLS = 700 };
    SCOPED_WORLD world = open_world(1, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct call *call = make_call(0, 1);
    uint32_t taken = 0, ended = 0;
    for (uint64_t token = 1; token <= CALLS; token++) {
        cl_operation *operation;
        CHECK_EQ(submit_call(&team, 0, call, 0, &operation), CL_OK);
        ended += cl_operation_notify(operation, token) == CL_OK;
        cl_operation_wait(operation, 0);
        cl_operation_release(operation); /* the event comes all the same */
        if (token == 100) {
            struct cl_event events[64];
            taken += (uint32_t)cl_engine_events(world.engines[0], events, 64, 1000); /* so that the ring wraps */
        }
    }
    for (uint32_t more = 1; taken + ended < CALLS - 5 && more > 0; taken += more) {
        struct cl_event events[5];
        more = (uint32_t)cl_engine_events(world.engines[0], events, 5, PATIENCE_US);
    }
    CHECK(taken + ended >= CALLS - 5 && taken + ended <= CALLS);
    free(call);
}
