/* Host queues: the order of operations in shared memory, the threads that run them, and their ends. */
#include "sim/host.h"
#include "tests/world.h"

enum { CLASS = 4 /* of the calls of a team */, QUEUE = 2 * CLASS };

/* Both 32-bit counters of a group's order pass zero in the middle. */
TEST(test_counters_wrap)
{
    SCOPED_WORLD world = open_world(2, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job jobs[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_group *group = team.groups[rank];
        struct cl_host_queue *queue = &group->host_queues.queues[QUEUE];
        group->sequence = UINT32_MAX - 10;
        queue->base = queue->previous_base = UINT32_MAX - 20;
        atomic_store(queue->places[rank].counter, UINT32_MAX - 20);
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 30, .submit_every = 2, .timeout_us = PATIENCE_US};
    }
    run_jobs(jobs, 2);
    CHECK(team.groups[0]->host_queues.queues[QUEUE].base < 100);
}

/* What a rank that gives up leaves behind must not look like a result to the others: here rank 1 waits for rank 0's
 * second post, while rank 0 waits for a third rank, in vain. */
TEST(test_no_result_from_a_rank_that_failed)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct draft draft = {.rank = 0, .world_size = 3, .staging_bytes = STAGING};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 2, .message = 1}, DRAFT_NONE);
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .message = 1}, last);
    cl_plan_release(team.plans[0]);
    team.plans[0] = draft_finish(&draft);
    draft = (struct draft){.rank = 1, .world_size = 3, .staging_bytes = STAGING};
    last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 0, .message = 1}, DRAFT_NONE);
    draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = 1, .message = 1}, last);
    cl_plan_release(team.plans[1]);
    team.plans[1] = draft_finish(&draft);
    struct job jobs[] = {
        {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ETIMEDOUT, .timeout_us = 50000},
        {.team = &team, .rank = 1, .rounds = 1, .expected = CL_EABORTED, .timeout_us = PATIENCE_US},
    };
    run_jobs(jobs, 2);
}

/* One thread runs an operation in cl_run when another closes the group. */
TEST(test_close_under_a_caller)
{
    for (int round = 0; round < 20; round++) {
        SCOPED_WORLD world = open_world(2, "none", 0);
        SCOPED_TEAM team = open_team(&world, 1, true);
        struct job caller = {.team = &team, .rank = 0, .rounds = 1, .expected = CL_ECLOSED, .timeout_us = PATIENCE_US};
        pthread_create(&caller.thread, NULL, work, &caller);
        while (!atomic_load(&team.groups[0]->host_queues.queues[QUEUE].taken)) {
        }
        cl_group_close(team.groups[0]);
        team.groups[0] = NULL;
        pthread_join(caller.thread, NULL);
    }
}

/* ---- classes, with engines whose turns the test gives ---- */

enum { ENDS_MAX = 8, PARTS = 60, EXCHANGES = 30, PIECES = 16, PIECE = CL_WORK_BUDGET_BESIDE_BYTES / 2 };

/* Two ranks of one host in virtual surroundings, and perhaps others elsewhere. */
struct pair {
    uint32_t size; /* of their group */
    struct sim_host host;
    struct sim_member members[2];
    struct cl_groups groups[2];
    uint64_t now_us; /* of submissions */
    uint32_t end_count[2];
    const struct cl_operation *ends[2][ENDS_MAX]; /* operations in the order in which they ended */
    int statuses[2][ENDS_MAX];
    uint8_t memory[2][1 << 20];
};
static struct pair *pair;

static void call(void *context)
{
    struct sim_member *member = context;
    cl_groups_call(member->group.groups);
}

static void note_end(void *context, struct cl_operation *operation, int status)
{
    uint32_t rank = context == &pair->members[1];
    pair->ends[rank][pair->end_count[rank]] = operation;
    pair->statuses[rank][pair->end_count[rank]++] = status;
}

static void open_pair_of(uint32_t size)
{
    static const uint16_t peers[] = {0, 1, 2};
    pair = calloc(1, sizeof *pair);
    pair->size = size;
    sim_host_init(&pair->host, 2, STAGING, UINT8_MAX);
    pair->host.local[1] = 1;
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_group_options options = {
            .id = 1, .rank = rank, .size = size, .peers = peers, .local = pair->host.local, .local_count = 2};
        struct cl_group_io io = {.wake = call, .ended = note_end};
        sim_member_open(&pair->members[rank], NULL, &pair->host, &options, NULL, io);
        cl_groups_add(&pair->groups[rank], &pair->members[rank].group);
    }
}

static void open_pair(void)
{
    open_pair_of(2);
}

static void close_pair(void)
{
    for (uint32_t rank = 0; rank < 2; rank++)
        cl_group_free(&pair->members[rank].group);
    sim_host_free(&pair->host);
    free(pair);
}

/* Takes `exchanges` posts, each after the other rank's previous one. */
static cl_plan *plan_of_exchanges(uint32_t rank, uint32_t exchanges)
{
    struct draft draft = {.rank = rank, .world_size = pair->size};
    uint32_t last = DRAFT_NONE;
    for (uint32_t i = 1; i <= exchanges; i++) {
        last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = i}, last);
        last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1 - rank, .message = i}, last);
    }
    return draft_finish(&draft);
}

/* Copies PARTS times a whole budget, and waits for nobody. */
static cl_plan *plan_of_copies(uint32_t rank)
{
    struct draft draft = {.rank = rank,
                          .world_size = pair->size,
                          .input_bytes = CL_WORK_BUDGET_BYTES,
                          .output_bytes = CL_WORK_BUDGET_BYTES};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
    for (uint32_t i = 0; i < PARTS; i++)
        last = draft_add(
            &draft,
            (struct cl_step){.kind = CL_COPY, .peer = rank, .target = CL_OUTPUT, .length = CL_WORK_BUDGET_BYTES}, last);
    return draft_finish(&draft);
}

static void start_in(struct cl_group *group, struct cl_operation *operation, uint8_t *output, cl_plan *plan,
                     uint32_t class, uint64_t timeout_us)
{
    struct cl_operation_request request = {.plan = plan,
                                           .input = pair->memory[group->rank],
                                           .output = output,
                                           .dtype = CL_U8,
                                           .qos = {.priority = (uint8_t) class},
                                           .timeout_us = timeout_us};
    CHECK_EQ(cl_group_request(group, operation, &request, pair->now_us), CL_OK);
    cl_plan_release(plan); /* the operation has its own hold on it */
    cl_group_order(group, operation);
    cl_group_queue(group, operation);
    cl_groups_take(operation);
}

static void start(struct cl_operation *operation, uint32_t rank, cl_plan *plan, uint32_t class, uint64_t timeout_us)
{
    start_in(&pair->members[rank].group, operation, pair->memory[rank], plan, class, timeout_us);
}

/* Starts exchanges on both ranks. */
static void start_exchanges(struct cl_operation operation[2], uint32_t class, uint32_t exchanges)
{
    for (uint32_t rank = 0; rank < 2; rank++)
        start(&operation[rank], rank, plan_of_exchanges(rank, exchanges), class, 0);
}

/* One turn of a rank. Returns whether it wants the next one at once. */
static bool progress(uint32_t rank, uint64_t now_us)
{
    uint64_t deadline_us = UINT64_MAX;
    return cl_groups_progress(&pair->groups[rank], now_us, &deadline_us);
}

static void free_operations(struct cl_operation (*operations)[2], uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t rank = 0; rank < 2; rank++)
            cl_operation_free(&operations[i][rank]);
}

TEST(test_urgent_overtakes)
{
    enum { BULK, LATER, URGENT, MIDDLE, COUNT };
    struct cl_operation operations[COUNT][2];
    open_pair();
    start_exchanges(operations[BULK], 7, EXCHANGES);
    start_exchanges(operations[LATER], 7, 1); /* of the same class: in order, however short */
    for (int i = 0; i < 3; i++)
        progress(0, 0), progress(1, 0);
    start_exchanges(operations[URGENT], 0, 2);
    start_exchanges(operations[MIDDLE], 5, 3);
    for (int i = 0; i < EXCHANGES + 5; i++)
        progress(0, 0), progress(1, 0);
    static const uint32_t order[] = {URGENT, MIDDLE, BULK, LATER};
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK_EQ(pair->end_count[rank], COUNT);
        for (uint32_t i = 0; i < COUNT; i++) {
            CHECK(pair->ends[rank][i] == &operations[order[i]][rank]);
            CHECK_EQ(pair->statuses[rank][i], CL_OK);
        }
    }
    free_operations(operations, COUNT);
    close_pair();
}

/* In a group of several hosts two operations of a class run at once: the third one waits for the first. */
TEST(test_operations_of_several_hosts_overlap)
{
    enum { LONG, SHORT, THIRD, COUNT };
    struct cl_operation operations[COUNT][2];
    open_pair_of(3);
    start_exchanges(operations[LONG], CLASS, EXCHANGES);
    start_exchanges(operations[SHORT], CLASS, 1);
    start_exchanges(operations[THIRD], CLASS, 1);
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK_EQ(operations[LONG][rank].turn.queue, QUEUE);
        CHECK_EQ(operations[SHORT][rank].turn.queue, QUEUE + 1);
        CHECK_EQ(operations[THIRD][rank].turn.queue, QUEUE);
    }
    for (int i = 0; i < 3; i++)
        progress(0, 0), progress(1, 0);
    CHECK_EQ(pair->end_count[0], 1);
    for (int i = 0; i < EXCHANGES + 5; i++)
        progress(0, 0), progress(1, 0);
    static const uint32_t order[] = {SHORT, LONG, THIRD};
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK_EQ(pair->end_count[rank], COUNT);
        for (uint32_t i = 0; i < COUNT; i++)
            CHECK(pair->ends[rank][i] == &operations[order[i]][rank]);
    }
    free_operations(operations, COUNT);
    close_pair();
}

/* A calling thread overtakes no operation of its class, whichever queue that is in: it may be held. */
TEST(test_callers_wait_for_both_queues)
{
    struct cl_operation operation[2];
    open_pair_of(3);
    struct cl_host_queues *queues = &pair->members[0].group.host_queues;
    start(&operation[0], 0, plan_of_exchanges(0, 1), CLASS, 0);
    CHECK_EQ(cl_host_queues_next(queues, CLASS), QUEUE + 1);
    CHECK(cl_host_queues_enter(queues, CLASS) == NULL);
    CHECK(cl_host_queues_enter(queues, CLASS + 1) == &queues->queues[QUEUE + 2]);
    CHECK(!cl_host_queue_leave(&queues->queues[QUEUE + 2]));
    start(&operation[1], 1, plan_of_exchanges(1, 1), CLASS, 0);
    for (int turn = 0; turn < 3; turn++)
        progress(0, 0), progress(1, 0);
    CHECK_EQ(pair->end_count[0], 1);
    CHECK(cl_host_queues_enter(queues, CLASS) == &queues->queues[QUEUE + 1]);
    free_operations(&operation, 1);
    close_pair();
}

/* Of two queues of a class, that with the older operation goes first. */
TEST(test_older_operation_goes_first)
{
    enum { FIRST, OLDER, YOUNGER, COUNT };
    struct cl_operation operations[COUNT][2];
    open_pair_of(3);
    start_exchanges(operations[FIRST], CLASS, 1);
    for (uint32_t i = OLDER; i < COUNT; i++) /* YOUNGER in the queue of FIRST, which comes first otherwise */
        for (uint32_t rank = 0; rank < 2; rank++)
            start(&operations[i][rank], rank, plan_of_copies(rank), CLASS, 0);
    for (int turn = 0; turn < 3 * PARTS; turn++)
        progress(0, 0), progress(1, 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(pair->ends[0][i] == &operations[i][0]);
    free_operations(operations, COUNT);
    close_pair();
}

/* Urgent work that never waits leaves bulk every CL_HOST_QUEUE_GUARD-th turn, no more and no less. */
TEST(test_bulk_does_not_starve)
{
    enum { URGENT, MIDDLE, BULK, COUNT };
    struct cl_operation operations[COUNT][2];
    open_pair();
    for (uint32_t rank = 0; rank < 2; rank++)
        start(&operations[URGENT][rank], rank, plan_of_copies(rank), 1, 0);
    start_exchanges(operations[MIDDLE], 3, 1);
    start_exchanges(operations[BULK], 6, 1);
    for (int turn = 1; turn <= CL_HOST_QUEUE_GUARD; turn++) {
        CHECK(operations[BULK][0].executor == NULL);
        CHECK(progress(0, 0)); /* there is more to copy */
        progress(1, 0);
    }
    CHECK(operations[MIDDLE][0].executor != NULL);
    CHECK(operations[BULK][0].executor != NULL);
    for (int turn = 1; turn <= CL_HOST_QUEUE_GUARD; turn++) {
        CHECK_EQ(pair->end_count[0], 0);
        progress(0, 0);
        progress(1, 0);
    }
    CHECK_EQ(pair->end_count[0], 2);
    CHECK(pair->ends[0][0] == &operations[MIDDLE][0]);
    for (int turn = 2 * CL_HOST_QUEUE_GUARD; turn <= PARTS; turn++)
        progress(0, 0), progress(1, 0);
    CHECK_EQ(pair->end_count[0], COUNT);
    free_operations(operations, COUNT);
    close_pair();
}

/* Copies `count` pieces. */
static cl_plan *plan_of_pieces(uint32_t count)
{
    uint64_t bytes = (uint64_t)count * PIECE;
    struct draft draft = {.world_size = 1, .input_bytes = bytes, .output_bytes = bytes};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .message = 1}, DRAFT_NONE);
    for (uint32_t i = 0; i < count; i++)
        last = draft_add(&draft,
                         (struct cl_step){.kind = CL_COPY,
                                          .target = CL_OUTPUT,
                                          .source_offset = (uint64_t)i * PIECE,
                                          .target_offset = (uint64_t)i * PIECE,
                                          .length = PIECE},
                         last);
    return draft_finish(&draft);
}

/* A group of rank 0 alone, before the pair's group in the list of those that are awake. */
static void open_loner(struct sim_member *loner, struct sim_host *host)
{
    static const uint16_t peer;
    sim_host_init(host, 1, STAGING, UINT8_MAX);
    struct cl_group_options options = {.id = 2, .size = 1, .peers = &peer, .local = host->local, .local_count = 1};
    struct cl_group_io io = {.wake = call, .ended = note_end};
    sim_member_open(loner, NULL, host, &options, NULL, io);
    cl_groups_remove(&pair->groups[0], &pair->members[0].group);
    cl_groups_add(&pair->groups[0], &loner->group);
    cl_groups_add(&pair->groups[0], &pair->members[0].group);
}

/* Of several groups, the one with the most urgent operation goes first. Beside it the others copy less in a turn. */
TEST(test_urgent_group_goes_first)
{
    struct cl_operation bulk, end, urgent[2][2];
    struct sim_member loner;
    struct sim_host host;
    uint32_t copied = 0;
    open_pair();
    open_loner(&loner, &host);
    memset(pair->memory[0], 1, sizeof pair->memory[0]);
    start_in(&loner.group, &bulk, pair->memory[1], plan_of_pieces(PIECES), 6, 0);
    start_exchanges(urgent[0], 2, 2);
    CHECK(progress(0, 0)); /* there is more to copy */
    CHECK(urgent[0][0].executor != NULL);
    for (uint32_t i = 0; i < PIECES; i++)
        copied += pair->memory[1][i * PIECE];
    CHECK_EQ(copied, CL_WORK_BUDGET_BESIDE_BYTES / PIECE);
    for (int turn = 0; turn < PIECES; turn++)
        progress(1, 0), progress(0, 0);
    CHECK_EQ(pair->end_count[0], 2);
    start_in(&loner.group, &end, pair->memory[1], plan_of_pieces(1), 6, 0);
    start_exchanges(urgent[1], 2, 1);
    progress(1, 0);
    progress(0, 0); /* both end in this turn */
    CHECK_EQ(pair->end_count[0], 4);
    CHECK(pair->ends[0][2] == &urgent[1][0]);
    CHECK(pair->ends[0][3] == &end);
    progress(1, 0);
    free_operations(urgent, 2);
    cl_operation_free(&bulk);
    cl_operation_free(&end);
    cl_group_free(&loner.group);
    sim_host_free(&host);
    close_pair();
}

/* Ranks that call the same operation in different classes wait in different queues. `warm`: operations before that
 * agree, of either class. */
static void differ_in_classes(uint32_t size, uint32_t warm)
{
    enum { COUNT = 4 };
    struct cl_operation operations[COUNT][2];
    open_pair_of(size);
    for (uint32_t i = 0; i < warm; i++) {
        start_exchanges(operations[1 + i], 2 + 3 * i, 1);
        for (int turn = 0; turn < 3; turn++)
            progress(0, 0), progress(1, 0);
    }
    CHECK_EQ(pair->end_count[0], warm);
    start(&operations[0][0], 0, plan_of_exchanges(0, 1), 2, 0);
    start(&operations[0][1], 1, plan_of_exchanges(1, 1), 5, 0);
    for (int turn = 0; turn < 3; turn++)
        progress(0, 0), progress(1, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_group *group = &pair->members[rank].group;
        uint32_t own, theirs;
        CHECK_EQ(pair->end_count[rank], warm + 1);
        CHECK_EQ(pair->statuses[rank][warm], CL_EMISMATCH);
        CHECK_EQ(atomic_load(&group->status), CL_EMISMATCH);
        CHECK(atomic_load(&group->culprit) < 2);
        CHECK(cl_host_queues_classes(&group->host_queues, 1 - rank, &own, &theirs));
        CHECK_EQ(own, rank == 0 ? 2 : 5);
        CHECK_EQ(theirs, rank == 0 ? 5 : 2);
    }
    free_operations(operations, 1 + warm);
    close_pair();
}

TEST(test_classes_that_differ)
{
    for (uint32_t size = 2; size <= 3; size++)
        for (uint32_t warm = 0; warm < 3; warm++)
            differ_in_classes(size, warm);
}

static void check_times(const struct cl_operation *operation, uint64_t submitted_us, uint64_t first_us,
                        uint64_t ended_us)
{
    CHECK_EQ(operation->times.submitted_us, submitted_us);
    CHECK_EQ(operation->times.first_us, first_us);
    CHECK_EQ(operation->times.ended_us, ended_us);
}

/* The times of an operation that waits for its turn are checked, too. */
TEST(test_times)
{
    struct cl_operation operations[3][2];
    open_pair();
    pair->now_us = 5;
    start_exchanges(operations[0], 4, 1);
    start_exchanges(operations[1], 4, 1);
    progress(0, 10);
    progress(1, 20); /* both operations post here */
    pair->now_us = 25;
    start(&operations[2][0], 0, plan_of_exchanges(0, 1), 6, 0);
    progress(0, 30);
    check_times(&operations[0][0], 5, 10, 30);
    check_times(&operations[0][1], 5, 20, 20);
    progress(0, 40);
    progress(1, 50);
    check_times(&operations[1][0], 5, 30, 30);
    check_times(&operations[1][1], 5, 20, 50);
    cl_group_fail(&pair->members[0].group, CL_EABORTED, 0);
    progress(0, 60);
    check_times(&operations[2][0], 25, 30, 60);
    free_operations(operations, 2);
    cl_operation_free(&operations[2][0]);
    close_pair();
}

/* However a group ends, the operations of all its queues end. */
static void end_queues(int reason)
{
    enum { COUNT = 6 };
    struct cl_operation operations[COUNT][2];
    open_pair();
    struct cl_group *group = &pair->members[0].group;
    for (uint32_t i = 0; i < COUNT; i++) /* the last one is not the first of its queue */
        start(&operations[i][0], 0, plan_of_exchanges(0, 1), i % 4 * 2, i + 1 == COUNT ? 1000 : 0);
    progress(0, 10);
    if (reason == CL_ETIMEDOUT)
        progress(0, 999);
    CHECK_EQ(pair->end_count[0], 0);
    if (reason == CL_ETIMEDOUT) {
        progress(0, 1000);
    } else if (reason == CL_EPEERLOST) {
        cl_group_peer_died(group, 1);
        progress(0, 20);
    } else if (reason == CL_EABORTED) {
        cl_group_fail(&pair->members[1].group, CL_ETIMEDOUT, 1);
        progress(0, 20);
    } else {
        atomic_store(&group->status, CL_ECLOSED); /* as cl_group_close does */
        cl_group_leave(group, 20);
    }
    CHECK_EQ(pair->end_count[0], COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK_EQ(pair->statuses[0][i], reason);
    for (uint32_t queue = 0; queue < CL_GROUP_QUEUES; queue++)
        CHECK_EQ(atomic_load(&group->host_queues.queues[queue].queued), 0);
    for (uint32_t i = 0; i < COUNT; i++)
        cl_operation_free(&operations[i][0]);
    close_pair();
}

TEST(test_ends_of_queues)
{
    end_queues(CL_ETIMEDOUT);
    end_queues(CL_EPEERLOST);
    end_queues(CL_EABORTED);
    end_queues(CL_ECLOSED);
}

/* ---- classes, with threads ---- */

enum { MIXED = 96 };

/* One rank's calls, of all classes; some run in this thread. */
static void *work_mixed(void *argument)
{
    struct job *job = argument;
    struct call *calls[MIXED];
    cl_operation *operations[MIXED] = {0};
    for (uint32_t i = 0; i < MIXED; i++) {
        calls[i] = make_call(job->rank, i);
        struct cl_operation_request request = request_of(job->team, job->rank, calls[i], PATIENCE_US);
        request.qos.priority = (uint8_t)(i * 5 % CL_CLASSES);
        if (i % 3 == 0)
            CHECK_EQ(cl_run(job->team->groups[job->rank], &request), CL_OK);
        else
            CHECK_EQ(cl_submit(job->team->groups[job->rank], &request, &operations[i]), CL_OK);
    }
    for (uint32_t i = 0; i < MIXED; i++) {
        if (operations[i] != NULL) {
            CHECK_EQ(cl_operation_wait(operations[i], 0), CL_OK);
            cl_operation_release(operations[i]);
        }
        check_call(calls[i], job->team->world->size, i);
        free(calls[i]);
    }
    return NULL;
}

TEST(test_mixed_classes)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job jobs[3];
    for (uint32_t rank = 0; rank < 3; rank++) {
        jobs[rank] = (struct job){.team = &team, .rank = rank};
        pthread_create(&jobs[rank].thread, NULL, work_mixed, &jobs[rank]);
    }
    for (uint32_t rank = 0; rank < 3; rank++)
        pthread_join(jobs[rank].thread, NULL);
}

/* Ranks 0 and 1 exchange a post; rank 2 only posts. */
static cl_plan *plan_without_rank_2(uint32_t rank)
{
    struct draft draft = {.rank = rank, .world_size = 3};
    uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
    if (rank < 2)
        draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1 - rank, .message = 1}, last);
    return draft_finish(&draft);
}

/* While one thread waits in an operation for rank 2, another thread runs a later one of another class. */
TEST(test_callers_of_two_classes)
{
    SCOPED_WORLD world = open_world(3, "none", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct job waiting = {.team = &team, .rank = 0, .rounds = 1, .timeout_us = PATIENCE_US};
    pthread_create(&waiting.thread, NULL, work, &waiting);
    while (!atomic_load(&team.groups[0]->host_queues.queues[QUEUE].taken)) {
    }
    struct call *calls[] = {NULL, make_call(1, 1), make_call(2, 1)};
    cl_operation *first[3], *second[3];
    for (uint32_t rank = 1; rank < 4; rank++) { /* rank 0 goes before rank 2 */
        uint32_t self = rank == 2 ? 0 : rank == 3 ? 2 : rank;
        SCOPED_PLAN *plan = plan_without_rank_2(self);
        struct cl_operation_request request = {.plan = plan, .dtype = CL_U8, .timeout_us = PATIENCE_US};
        if (self == 0) {
            CHECK_EQ(cl_run(team.groups[0], &request), CL_OK);
            CHECK(atomic_load(&team.groups[0]->host_queues.queues[QUEUE].taken));
            continue;
        }
        CHECK_EQ(submit_call(&team, self, calls[self], PATIENCE_US, &first[self]), CL_OK);
        CHECK_EQ(cl_submit(team.groups[self], &request, &second[self]), CL_OK);
    }
    pthread_join(waiting.thread, NULL);
    for (uint32_t rank = 1; rank < 3; rank++) {
        CHECK_EQ(cl_operation_wait(first[rank], 0), CL_OK);
        CHECK_EQ(cl_operation_wait(second[rank], 0), CL_OK);
        cl_operation_release(first[rank]);
        cl_operation_release(second[rank]);
        check_call(calls[rank], 3, 1);
        free(calls[rank]);
    }
}
