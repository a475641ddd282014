/* Operations whose inputs a device copies: they start when it opens their gate, and tell it of their end by a word. A
 * thread stands for the device, so TSan sees whether the words order the memory. */
#include "group/held.h"

#include <unistd.h>

#include "tests/world.h"

struct device {
    struct call *call;
    uint32_t rank, round;
    _Atomic uint32_t gate, done;
    useconds_t delay_us;
    uint32_t first; /* of the output, when it was done */
    pthread_t thread;
};

static uint32_t *word(_Atomic uint32_t *word)
{
    return (uint32_t *)word;
}

static struct cl_operation_request gated(const struct team *team, struct device *device, uint64_t timeout_us)
{
    struct cl_operation_request request = request_of(team, device->rank, device->call, timeout_us);
    request.gate = word(&device->gate);
    request.done = word(&device->done);
    return request;
}

/* Waits for a word; false: it has not come. */
static bool comes(const _Atomic uint32_t *word, uint64_t limit_us)
{
    for (uint64_t end = cl_now_us() + limit_us; cl_now_us() < end; usleep(50))
        if (atomic_load_explicit(word, memory_order_acquire) != 0)
            return true;
    return atomic_load_explicit(word, memory_order_acquire) != 0;
}

static void *copy(void *argument)
{
    struct device *device = argument;
    usleep(device->delay_us);
    for (uint32_t i = 0; i < WORDS; i++)
        device->call->input[i] = i + device->round + (1000000u << device->rank);
    atomic_store_explicit(&device->gate, 1, memory_order_release);
    CHECK(comes(&device->done, PATIENCE_US));
    device->first = device->call->output[0];
    check_call(device->call, 2, device->round);
    return NULL;
}

/* Each rank submits a gated operation and one behind it, before any gate opens; the second device is the faster one. */
static void check_order(bool shared)
{
    enum { ROUNDS = 20 };
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, shared);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        struct device devices[2];
        struct call *behind[2];
        cl_operation *operations[4];
        for (uint32_t rank = 0; rank < 2; rank++) {
            devices[rank] = (struct device){.rank = rank, .round = round, .delay_us = rank == 0 ? 2000 : 100};
            devices[rank].call = calloc(1, sizeof *devices[rank].call);
            behind[rank] = make_call(rank, round);
            struct cl_operation_request request = gated(&team, &devices[rank], PATIENCE_US);
            CHECK_EQ(cl_submit(team.groups[rank], &request, &operations[2 * rank]), CL_OK);
            CHECK_EQ(submit_call(&team, rank, behind[rank], PATIENCE_US, &operations[2 * rank + 1]), CL_OK);
            usleep(100);
            CHECK_EQ(cl_operation_status(operations[2 * rank]), CL_EAGAIN);
            CHECK_EQ(cl_operation_status(operations[2 * rank + 1]), CL_EAGAIN);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            pthread_create(&devices[rank].thread, NULL, copy, &devices[rank]);
        for (uint32_t rank = 0; rank < 2; rank++)
            pthread_join(devices[rank].thread, NULL);
        for (uint32_t i = 0; i < 4; i++) {
            CHECK_EQ(cl_operation_wait(operations[i], 0), CL_OK);
            cl_operation_release(operations[i]);
        }
        for (uint32_t rank = 0; rank < 2; rank++) {
            check_call(behind[rank], 2, round);
            free(behind[rank]);
            free(devices[rank].call);
        }
    }
}

TEST(test_an_operation_and_those_behind_it_wait_for_its_gate)
{
    check_order(false);
    check_order(true);
}

/* The inputs and results of one operation may share memory: NaN comes after the copies. */
TEST(test_a_failed_operation_ends_with_nan_once_its_gate_opens)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct device device = {.call = make_call(0, 1)};
    struct cl_operation_request request = gated(&team, &device, PATIENCE_US);
    cl_operation *operation;
    CHECK_EQ(cl_submit(team.groups[0], &request, &operation), CL_OK);
    cl_group_abort(team.groups[1], CL_OK);
    for (uint64_t end = cl_now_us() + PATIENCE_US; cl_group_status(team.groups[0], NULL) == CL_OK && cl_now_us() < end;)
        usleep(100);
    CHECK(!comes(&device.done, 20000));
    CHECK_EQ(team.plans[0]->output_bytes, 4 * WORDS); /* whatever the caller has said: Python says no limit */
    CHECK_EQ(cl_operation_status(operation), CL_EAGAIN);
    memset(device.call->output, 0, sizeof device.call->output);
    atomic_store(&device.gate, 1);
    CHECK(comes(&device.done, PATIENCE_US));
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < WORDS; i++)
        wrong += device.call->output[i] != UINT32_MAX;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(cl_operation_wait(operation, 0), CL_EABORTED);
    cl_operation_release(operation);
    free(device.call);
}

TEST(test_a_group_closes_though_a_gate_never_opens)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    struct device device = {.call = make_call(0, 1)};
    cl_operation *operation;
    {
        SCOPED_TEAM team = open_team(&world, 1, false);
        struct cl_operation_request request = gated(&team, &device, PATIENCE_US);
        CHECK_EQ(cl_submit(team.groups[0], &request, &operation), CL_OK);
    }
    CHECK_EQ(atomic_load(&device.done), 1);
    CHECK_EQ(cl_operation_status(operation), CL_ECLOSED);
    cl_operation_release(operation);
    free(device.call);
}

TEST(test_the_timeout_begins_when_the_gate_opens)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct device device = {.call = make_call(0, 1)};
    struct cl_operation_request request = gated(&team, &device, 200000);
    cl_operation *operation;
    CHECK_EQ(cl_submit(team.groups[0], &request, &operation), CL_OK);
    CHECK(!comes(&device.done, 300000));
    atomic_store(&device.gate, 1);
    CHECK(!comes(&device.done, 50000));
    CHECK_EQ(cl_operation_wait(operation, 0), CL_ETIMEDOUT); /* the other rank never calls */
    CHECK(comes(&device.done, PATIENCE_US));
    cl_operation_release(operation);
    free(device.call);
}

/* Rank 0 sends what its device has yet to copy. Its receive, submitted later, does not wait for that. */
TEST(test_a_receive_passes_a_send_that_is_held)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    static uint32_t out, in, got, sent = 7;
    _Atomic uint32_t gate = 0, done = 0;
    out = in = got = 0;
    cl_operation *operations[4];
    struct cl_message_request send = {.rank = 1, .memory = &out, .length = 4, .priority = 4, .gate = word(&gate)};
    struct cl_message_request receive = {.rank = 1, .memory = &in, .length = 4, .done = word(&done)};
    struct cl_message_request answer = {.rank = 0, .memory = &sent, .length = 4, .priority = 4};
    struct cl_message_request last = {.rank = 0, .memory = &got, .length = 4};
    CHECK_EQ(cl_send(team.groups[0], &send, &operations[0]), CL_OK);
    CHECK_EQ(cl_receive(team.groups[0], &receive, &operations[1]), CL_OK);
    CHECK_EQ(cl_send(team.groups[1], &answer, &operations[2]), CL_OK);
    CHECK_EQ(cl_receive(team.groups[1], &last, &operations[3]), CL_OK);
    CHECK(comes(&done, PATIENCE_US));
    CHECK_EQ(in, 7);
    CHECK_EQ(cl_operation_status(operations[0]), CL_EAGAIN); /* no early end: its memory is not ready */
    out = 9;
    atomic_store_explicit(&gate, 1, memory_order_release);
    CHECK_EQ(cl_operation_wait(operations[3], 0), CL_OK);
    CHECK_EQ(got, 9);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK_EQ(cl_operation_wait(operations[i], 0), CL_OK);
        cl_operation_release(operations[i]);
    }
}

TEST(test_a_call_that_waits_takes_no_words)
{
    SCOPED_WORLD world = open_world(1, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct device device = {.call = make_call(0, 1)};
    struct cl_operation_request request = gated(&team, &device, PATIENCE_US);
    CHECK_EQ(cl_run(team.groups[0], &request), CL_EINVAL);
    free(device.call);
}

TEST(test_the_engine_looks_often_at_first_and_not_at_all_while_none_is_held)
{
    _Atomic uint32_t gate = 0;
    struct cl_operation operation = {.gate = &gate, .timeout_us = 5};
    struct cl_held held;
    uint64_t deadline = UINT64_MAX;
    cl_held_init(&held);
    CHECK(cl_held_next(&held, 1000, &deadline) == NULL);
    CHECK_EQ(deadline, UINT64_MAX);
    cl_held_add(&held, &operation);
    static const uint64_t at[] = {1000, 1160, 1960, 100000}, after[] = {20, 20, 60, 1000};
    for (uint32_t i = 0; i < 4; i++) {
        deadline = UINT64_MAX;
        CHECK(cl_held_next(&held, at[i], &deadline) == NULL);
        CHECK_EQ(deadline, at[i] + after[i]);
    }
    atomic_store(&gate, 1);
    CHECK(cl_held_next(&held, 200000, &deadline) == &operation);
    CHECK_EQ(operation.deadline_us, 200005);
    CHECK(cl_held_next(&held, 200000, &deadline) == NULL);
}
