/* Many operations in flight: how many of them a turn visits. */
#include "group/waiting.h"

#include <stdlib.h>

#include "group/groups.h"
#include "sim/host.h"
#include "tests/check.h"
#include "tests/draft.h"

enum { MANY = 1000, BYTES = 64, TIMEOUT_US = 5000000 };

/* A rank whose peer, on another host, is late: it sends nothing. */
struct town {
    struct cl_endpoint *endpoint;
    struct sim_host host;
    struct sim_member member;
    struct cl_groups groups;
    uint8_t memory[2 * BYTES];
    struct cl_operation operations[MANY];
    uint32_t ends[MANY], ended; /* in the order in which they ended */
    int status;
};
static struct town *town;

static void call(void *context)
{
    struct sim_member *member = context;
    cl_groups_call(member->group.groups);
}

static void note_end(void *context, struct cl_operation *operation, int status)
{
    (void)context;
    town->ends[town->ended++] = (uint32_t)(operation - town->operations);
    town->status = status;
}

static void open_town(void)
{
    static const uint16_t peers[] = {0, 1};
    town = calloc(1, sizeof *town);
    struct cl_endpoint_config config = {.auth = CL_AUTH_HEADER, .datagram_bytes = 1472};
    CHECK_EQ(cl_endpoint_create(&config, &town->endpoint), CL_OK);
    CHECK_EQ(cl_endpoint_add_peer(town->endpoint, 1, 1, NULL), CL_OK);
    sim_host_init(&town->host, 1, 0, 0);
    struct cl_group_options options = {
        .id = 1, .rank = 0, .size = 2, .peers = peers, .local = town->host.local, .local_count = 1};
    struct cl_group_io io = {.wake = call, .ended = note_end};
    sim_member_open(&town->member, NULL, &town->host, &options, town->endpoint, io);
    cl_groups_add(&town->groups, &town->member.group);
}

static void close_town(void)
{
    cl_group_leave(&town->member.group, 0);
    cl_groups_remove(&town->groups, &town->member.group);
    cl_group_free(&town->member.group);
    for (uint32_t i = 0; i < MANY; i++)
        if (town->operations[i].plan != NULL)
            cl_operation_free(&town->operations[i]);
    sim_host_free(&town->host);
    cl_endpoint_destroy(town->endpoint);
    free(town);
}

static void start(uint32_t first, uint32_t end, uint64_t timeout_us)
{
    cl_plan *plan = draft_exchange(0, 2, BYTES);
    struct cl_operation_request request = {.plan = plan,
                                           .input = town->memory,
                                           .output = town->memory + BYTES,
                                           .dtype = CL_U8,
                                           .qos = {.priority = 4},
                                           .timeout_us = timeout_us};
    for (uint32_t i = first; i < end; i++) {
        struct cl_operation *operation = &town->operations[i];
        CHECK_EQ(cl_group_request(&town->member.group, operation, &request, 0), CL_OK);
        cl_group_order(&town->member.group, operation);
        cl_group_queue(&town->member.group, operation);
        cl_groups_take(operation);
    }
    cl_plan_release(plan);
}

static uint32_t count_started(void)
{
    uint32_t started = 0;
    for (uint32_t i = 0; i < MANY; i++)
        started += town->operations[i].executor != NULL;
    return started;
}

/* A turn starts a bounded number of operations, and then visits none that waits. */
TEST(test_a_turn_is_bounded)
{
    open_town();
    start(0, MANY, TIMEOUT_US);
    uint64_t deadline_us = UINT64_MAX;
    for (uint32_t started = 0; started < MANY;) {
        bool more = cl_groups_progress(&town->groups, 0, &deadline_us);
        uint32_t now = count_started();
        CHECK(now - started <= CL_STARTS_BUDGET);
        CHECK(now > started);
        CHECK_EQ(more, now < MANY);
        if (now == started)
            break;
        started = now;
    }
    CHECK_EQ(count_started(), MANY);
    CHECK(town->member.group.in_flight.first == NULL);
    CHECK(town->groups.awake == &town->member.group); /* it has operations in flight */
    CHECK_EQ(deadline_us, TIMEOUT_US);
    close_town();
    CHECK(true);
}

/* An operation that waits is visited again when one of its messages ends. */
TEST(test_the_end_of_a_message_ends_the_wait)
{
    open_town();
    start(0, 3, 0);
    uint64_t deadline_us = UINT64_MAX;
    CHECK(!cl_groups_progress(&town->groups, 0, &deadline_us));
    CHECK(town->member.group.in_flight.first == NULL);
    cl_endpoint_peer_lost(town->endpoint, 1);
    struct cl_completion completion;
    while (cl_endpoint_next_completion(town->endpoint, &completion))
        cl_group_complete(&completion);
    CHECK(town->member.group.waiting.first == NULL);
    CHECK_EQ(town->member.group.status, CL_EPEERLOST);
    cl_groups_progress(&town->groups, 0, &deadline_us);
    CHECK_EQ(town->ended, 3);
    CHECK_EQ(town->status, CL_EPEERLOST);
    close_town();
}

/* ... and when its time is over, which is that of the first one, whoever began to wait first. */
TEST(test_deadlines_end_the_wait)
{
    open_town();
    start(0, 1, 3 * TIMEOUT_US);
    start(1, 2, TIMEOUT_US);
    start(2, 3, 2 * TIMEOUT_US);
    uint64_t deadline_us = UINT64_MAX;
    cl_groups_progress(&town->groups, 0, &deadline_us);
    CHECK_EQ(deadline_us, TIMEOUT_US);
    cl_groups_progress(&town->groups, TIMEOUT_US - 1, &deadline_us);
    CHECK_EQ(town->ended, 0);
    cl_groups_progress(&town->groups, TIMEOUT_US, &deadline_us);
    CHECK_EQ(town->member.group.status, CL_ETIMEDOUT);
    CHECK_EQ(town->ended, 3);
    close_town();
}

/* In lists of their own: first in, first out, and from any place. */
TEST(test_lists)
{
    struct cl_waiting waiting;
    struct cl_operation_list list = {.last = &list.first};
    struct cl_operation operations[4] = {{.deadline_us = 40}, {.deadline_us = 10}, {.deadline_us = 30}, {0}};
    cl_waiting_init(&waiting);
    operations[3].deadline_us = UINT64_MAX;
    for (uint32_t i = 0; i < 4; i++)
        cl_waiting_add(&waiting, &operations[i]);
    CHECK_EQ(waiting.until_us, 10);
    cl_waiting_end_due(&waiting, 9, &list);
    CHECK(list.first == NULL);
    cl_waiting_end_due(&waiting, 10, &list);
    CHECK(list.first == &operations[1] && operations[1].next == NULL);
    CHECK_EQ(waiting.until_us, 30);
    cl_waiting_end(&waiting, &operations[3], &list);
    cl_waiting_end(&waiting, &operations[3], &list); /* it waits no more */
    CHECK(waiting.last == &operations[2]);
    cl_waiting_end(&waiting, &operations[0], &list);
    CHECK(waiting.first == &operations[2] && operations[2].previous == NULL);
    cl_waiting_end(&waiting, &operations[2], &list);
    CHECK(waiting.first == NULL && waiting.last == NULL);
    CHECK_EQ(waiting.until_us, UINT64_MAX);
    CHECK(list.last == &operations[2].next);
}
