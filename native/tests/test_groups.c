/* Groups of one process: which of them a turn visits. */
#include "group/groups.h"

#include <stdlib.h>

#include "sim/host.h"
#include "sim/scarcity.h"
#include "tests/check.h"
#include "tests/draft.h"
#include "tests/network.h"

enum { IDLE = 200, STAGING = 4096, PIECES = 8, PIECE = CL_WORK_BUDGET_BYTES };

/* Two ranks of one host in IDLE + 1 groups, in virtual surroundings. */
struct town {
    struct sim_host hosts[IDLE + 1];
    struct sim_member members[2][IDLE + 1];
    struct cl_groups groups[2];
    uint32_t visits[IDLE + 1]; /* of rank 0 */
    uint32_t ends;
};
static struct town *town;

static void call(void *context)
{
    struct sim_member *member = context;
    cl_groups_call(member->group.groups);
}

static void note_end(void *context, struct cl_operation *operation, int status)
{
    (void)context, (void)operation, (void)status;
    town->ends++;
}

/* A group that is visited asks first whether another rank has aborted it. */
static int note_visit(void *context, uint32_t *culprit)
{
    const struct sim_member *member = context;
    if (member->group.rank == 0)
        town->visits[member - town->members[0]]++;
    *culprit = member->host->culprit;
    return member->host->aborted;
}

static void open_town(void)
{
    static const uint16_t peers[] = {0, 1};
    town = calloc(1, sizeof *town);
    for (uint32_t i = 0; i <= IDLE; i++) {
        sim_host_init(&town->hosts[i], 2, STAGING, 0);
        town->hosts[i].local[1] = 1;
        for (uint32_t rank = 0; rank < 2; rank++) {
            struct sim_member *member = &town->members[rank][i];
            struct cl_group_options options = {
                .id = 1 + i, .rank = rank, .size = 2, .peers = peers, .local = town->hosts[i].local, .local_count = 2};
            struct cl_group_io io = {.wake = call, .ended = note_end};
            sim_member_open(member, NULL, &town->hosts[i], &options, NULL, io);
            member->group.io.aborted = note_visit;
            cl_groups_add(&town->groups[rank], &member->group);
        }
    }
}

static void close_town(void)
{
    for (uint32_t i = 0; i <= IDLE; i++) {
        for (uint32_t rank = 0; rank < 2; rank++) {
            cl_groups_remove(&town->groups[rank], &town->members[rank][i].group);
            cl_group_free(&town->members[rank][i].group);
        }
        sim_host_free(&town->hosts[i]);
    }
    free(town);
}

/* A turn of a rank. Returns how many groups rank 0 has visited in it. */
static uint32_t turn(uint32_t rank)
{
    uint64_t deadline_us = UINT64_MAX;
    uint32_t visits = 0;
    for (uint32_t i = 0; i <= IDLE; i++)
        visits -= town->visits[i];
    cl_groups_progress(&town->groups[rank], 0, &deadline_us);
    for (uint32_t i = 0; i <= IDLE; i++)
        visits += town->visits[i];
    return visits;
}

/* Copies as much as PIECES turns do, and waits for nobody. */
static cl_plan *plan_of_copies(uint64_t bytes)
{
    struct draft draft = {.world_size = 2, .input_bytes = PIECE, .output_bytes = PIECE};
    uint32_t last = DRAFT_NONE;
    for (uint32_t i = 0; i < PIECES; i++)
        last = draft_add(&draft, (struct cl_step){.kind = CL_COPY, .target = CL_OUTPUT, .length = bytes}, last);
    return draft_finish(&draft);
}

static void start(struct cl_group *group, struct cl_operation *operation, uint8_t *memory, uint64_t bytes)
{
    cl_plan *plan = plan_of_copies(bytes);
    struct cl_operation_request request = {
        .plan = plan, .input = memory, .output = memory + PIECE, .dtype = CL_U8, .qos = {.priority = 4}};
    CHECK_EQ(cl_group_request(group, operation, &request, 0), CL_OK);
    cl_plan_release(plan);
    cl_group_order(group, operation);
    cl_group_queue(group, operation);
    cl_groups_take(operation);
}

/* The rank of this member aborts its group and leaves, while another rank looks whether it is there. */
static bool leaves_now(void *context, uint32_t index, uint64_t now_us)
{
    const struct sim_member *member = context;
    (void)now_us;
    member->host->aborted = CL_EABORTED;
    member->host->culprit = index;
    return true;
}

TEST(test_a_rank_that_aborts_and_leaves_is_not_lost)
{
    open_town();
    struct cl_group *group = &town->members[0][0].group;
    group->io.is_gone = leaves_now;
    struct cl_operation operation = {.turn = {.queue = 8, .gate = 1}}; /* nobody has come to its gate */
    CHECK_EQ(cl_group_check_host(group, &operation, 0, UINT64_MAX), CL_EABORTED);
    close_town();
}

TEST(test_idle_groups_are_not_visited)
{
    open_town();
    uint8_t *memory = calloc(2, PIECE);
    struct cl_operation operation;
    CHECK_EQ(turn(0), IDLE + 1); /* new groups are awake */
    CHECK_EQ(turn(0), 0);
    CHECK(town->groups[0].awake == NULL);
    uint32_t turns = 0;
    for (start(&town->members[0][70].group, &operation, memory, PIECE); town->ends == 0; turns++)
        CHECK_EQ(turn(0), 1);
    CHECK(turns > 1);
    CHECK_EQ(town->visits[70], 1 + turns);
    CHECK_EQ(turn(0), 0);
    cl_operation_free(&operation);
    free(memory);
    close_town();
}

/* A call wakes those that have something to do, and no others. */
TEST(test_failures_wake_their_group)
{
    open_town();
    turn(0), turn(1);
    cl_group_fail(&town->members[0][3].group, CL_EABORTED, 0);
    cl_group_fail(&town->members[1][8].group, CL_ETIMEDOUT, 1); /* of the neighbour: rank 0 hears in shared memory */
    CHECK_EQ(turn(0), 2);
    CHECK_EQ(town->visits[3], 2);
    CHECK_EQ(town->visits[8], 2);
    CHECK_EQ(town->members[0][8].group.status, CL_EABORTED);
    CHECK_EQ(town->members[0][8].group.culprit, 1);
    CHECK_EQ(turn(0), 0); /* a failed group that has told its peers sleeps, too */
    cl_groups_call(&town->groups[0]);
    CHECK_EQ(turn(0), 0);
    close_town();
}

/* A rank that wants something of one with nothing in flight. */
TEST(test_requests_wake_their_group)
{
    open_town();
    turn(0), turn(1);
    const struct cl_group_io *io = &town->members[1][5].group.io;
    for (uint32_t round = 0; round < 3; round++) {
        io->notify(io->context, 0, false); /* of a message, which waits in the ring for its receive */
        CHECK_EQ(turn(0), 0);
        io->notify(io->context, 0, true);
        CHECK_EQ(turn(0), 1);
        CHECK_EQ(town->visits[5], 2 + round);
        CHECK_EQ(turn(0), 0);
    }
    close_town();
}

/* Groups leave while they sleep, and while they are awake: the first, the last, and one between them. */
TEST(test_groups_leave)
{
    open_town();
    uint8_t *memory = calloc(2, PIECE);
    struct cl_operation operations[3];
    turn(0);
    for (uint32_t i = 0; i < 3; i++)
        start(&town->members[0][i].group, &operations[i], memory, 64);
    static const uint32_t order[] = {1, 2, 0};
    for (uint32_t i = 0; i < 3; i++) {
        struct cl_group *group = &town->members[0][order[i]].group;
        cl_groups_remove(&town->groups[0], group);
        cl_groups_wake(group); /* by a thread that has waited for it: it is of no list */
        CHECK_EQ(turn(0), i == 0 ? 2 : 0);
        cl_groups_add(&town->groups[0], group);
        CHECK_EQ(turn(0), 1);
        CHECK_EQ(turn(0), 0);
    }
    CHECK_EQ(town->ends, 3);
    for (uint32_t i = 0; i < 3; i++)
        cl_operation_free(&operations[i]);
    free(memory);
    close_town();
}

/* A group that fails without memory stays awake, and tells its peer once there is some. */
TEST(test_peers_are_told_again)
{
    static const uint16_t peers[] = {0, 1};
    SCOPED_NETWORK *network = network_new(2, 1, 200, 150, 1 << 20, 37);
    struct sim_host host;
    struct sim_member member = {.rank = NULL};
    struct cl_groups groups = {.first = NULL};
    struct sim_scarcity scarcity = {.failed = 0};
    struct cl_closed_group aborted;
    sim_host_init(&host, 1, STAGING, 0);
    struct cl_group_options options = {.id = 9, .size = 2, .peers = peers, .local = host.local, .local_count = 1};
    struct cl_group_io io = {.wake = call, .ended = note_end};
    sim_member_open(&member, NULL, &host, &options, network->hosts[0].endpoint, io);
    cl_groups_add(&groups, &member.group);
    cl_group_fail(&member.group, CL_ENOMEM, 0);
    uint64_t now_us = network_now_us(network), deadline_us = UINT64_MAX;
    sim_scarcity_set(&scarcity, 1);
    cl_groups_progress(&groups, now_us, &deadline_us);
    sim_scarcity_set(NULL, 0);
    CHECK_EQ(deadline_us, now_us + 1000);
    CHECK(groups.awake != NULL);
    cl_groups_progress(&groups, deadline_us, &deadline_us);
    CHECK(groups.awake == NULL);
    network_wake(network, 0);
    network_run_until(network, network_now_us(network) + 10000);
    CHECK(cl_endpoint_next_abort(network->hosts[1].endpoint, &aborted));
    CHECK_EQ(aborted.reason, CL_ENOMEM);
    cl_groups_remove(&groups, &member.group);
    cl_group_free(&member.group);
    sim_host_free(&host);
}
