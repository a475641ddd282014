/* Short messages between hosts, whose sends are done before they are delivered; and collectives, which are done before
 * all that they have sent is acknowledged. */
#include "tests/world.h"

#include <unistd.h>

#include "engine/member.h"

enum { MESSAGES = CL_EAGER_LIMIT_BYTES / (CL_EAGER_MESSAGE_BYTES + CL_EAGER_COST_BYTES) };

/* Sends with the receiver's engine at a halt: nothing can be delivered. */
static int status_of_send(struct team *team, void *memory, uint64_t length)
{
    cl_operation *send = start_send(team, 0, 1, 1, memory, length, PATIENCE_US);
    int status = cl_operation_status(send);
    if (status == CL_OK)
        cl_operation_release(send);
    return status;
}

static void halt(struct team *team)
{
    pthread_mutex_lock(&team->world->engines[1]->core);
}

static void go_on(struct team *team)
{
    pthread_mutex_unlock(&team->world->engines[1]->core);
}

/* The caller may also use its memory again, and the message is the one that it sent. */
TEST(test_done_before_delivery)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out[9000], in[9000];
    memset(out, 7, sizeof out);
    halt(&team);
    cl_operation *send = start_send(&team, 0, 1, 1, out, sizeof out, PATIENCE_US);
    CHECK_EQ(cl_operation_status(send), CL_OK);
    CHECK_EQ(cl_operation_notify(send, 1), CL_OK);
    struct cl_operation_times times, later;
    CHECK_EQ(cl_operation_times(send, &times), CL_OK);
    CHECK(times.submitted_us > 0 && times.submitted_us <= times.first_us && times.first_us <= times.ended_us);
    memset(out, 8, sizeof out);
    go_on(&team);
    CHECK_EQ(finish(start_receive(&team, 1, 0, 1, in, sizeof in, PATIENCE_US)), CL_OK);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < sizeof in; i++)
        wrong += in[i] != 7;
    CHECK_EQ(wrong, 0);
    cl_member_flush(cl_member_of(team.groups[0]));
    CHECK_EQ(atomic_load(&cl_member_of(team.groups[0])->eager.bytes), 0);
    struct cl_submission *submission = (void *)send;
    for (uint32_t i = 0; i < 5000 && atomic_load(&submission->references) > 1; i++)
        usleep(1000); /* the flush ends a moment before the engine drops its reference */
    CHECK_EQ(atomic_load(&submission->references), 1);
    CHECK(submission->copy == NULL);                   /* while the caller keeps its handle */
    CHECK_EQ(cl_operation_times(send, &later), CL_OK); /* they stay */
    CHECK_EQ(memcmp(&times, &later, sizeof times), 0);
    CHECK_EQ(finish(send), CL_OK);
}

/* A send without a gate may have a word for its end, too. */
TEST(test_word_at_the_end)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out = 7, in = 0;
    uint32_t word = 0;
    cl_operation *send;
    struct cl_message_request request = {
        .rank = 1, .tag = 1, .memory = &out, .length = 1, .timeout_us = PATIENCE_US, .done = &word};
    halt(&team);
    CHECK_EQ(cl_send(team.groups[0], &request, &send), CL_OK);
    CHECK_EQ(cl_operation_status(send), CL_OK);
    CHECK_EQ(word, 1);
    word = 2;
    go_on(&team);
    CHECK_EQ(finish(start_receive(&team, 1, 0, 1, &in, 1, PATIENCE_US)), CL_OK);
    cl_member_flush(cl_member_of(team.groups[0]));
    CHECK_EQ(finish(send), CL_OK);
    CHECK_EQ(word, 2); /* once: it is the caller's again */
}

TEST(test_limits)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t *out = calloc(1, CL_EAGER_MESSAGE_BYTES + 1), *in = calloc(1, CL_EAGER_MESSAGE_BYTES + 1);
    halt(&team);
    cl_operation *large = start_send(&team, 0, 1, 1, out, CL_EAGER_MESSAGE_BYTES + 1, PATIENCE_US);
    CHECK_EQ(cl_operation_status(large), CL_EAGAIN);
    for (uint32_t i = 0; i < MESSAGES; i++)
        CHECK_EQ(status_of_send(&team, out, CL_EAGER_MESSAGE_BYTES), CL_OK);
    cl_operation *beyond = start_send(&team, 0, 1, 1, out, CL_EAGER_MESSAGE_BYTES, PATIENCE_US);
    CHECK_EQ(cl_operation_status(beyond), CL_EAGAIN);
    go_on(&team);
    CHECK_EQ(finish(start_receive(&team, 1, 0, 1, in, CL_EAGER_MESSAGE_BYTES + 1, PATIENCE_US)), CL_OK);
    for (uint32_t i = 0; i <= MESSAGES; i++)
        CHECK_EQ(finish(start_receive(&team, 1, 0, 1, in, CL_EAGER_MESSAGE_BYTES, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish(large), CL_OK);
    CHECK_EQ(finish(beyond), CL_OK);
    free(out);
    free(in);
}

static void *close_sender(void *argument)
{
    struct team *team = argument;
    cl_group_close(team->groups[0]);
    return NULL;
}

TEST(test_close_delivers)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out[9000] = {1}, in[9000];
    pthread_t closing;
    halt(&team);
    CHECK_EQ(status_of_send(&team, out, sizeof out), CL_OK);
    pthread_create(&closing, NULL, close_sender, &team);
    usleep(20000);
    go_on(&team);
    pthread_join(closing, NULL);
    team.groups[0] = NULL;
    CHECK_EQ(finish(start_receive(&team, 1, 0, 1, in, sizeof in, PATIENCE_US)), CL_OK);
    CHECK_EQ(in[0], 1);
}

static void *linger(void *argument)
{
    cl_engine_linger(argument);
    return NULL;
}

/* A process that ends with its groups open. */
TEST(test_linger_delivers)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out[9000] = {1};
    pthread_t lingering;
    halt(&team);
    CHECK_EQ(status_of_send(&team, out, sizeof out), CL_OK);
    pthread_create(&lingering, NULL, linger, world.engines[0]);
    usleep(300000); /* longer than a process lingers for acknowledgements of its own */
    go_on(&team);
    pthread_join(lingering, NULL);
    CHECK_EQ(atomic_load(&cl_member_of(team.groups[0])->eager.bytes), 0);
}

/* The next operation has the error of a send that was done. */
TEST(test_failure_after_the_end)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t out[9000] = {1}, in[9000];
    halt(&team);
    CHECK_EQ(status_of_send(&team, out, sizeof out), CL_OK);
    cl_operation *receive = start_receive(&team, 0, 1, 1, in, sizeof in, PATIENCE_US);
    pthread_mutex_lock(&world.engines[0]->core);
    cl_endpoint_peer_lost(world.engines[0]->endpoint, 1);
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_engine_wake(world.engines[0]);
    CHECK_EQ(finish(receive), CL_EPEERLOST);
    CHECK_EQ(finish(start_send(&team, 0, 1, 1, out, sizeof out, PATIENCE_US)), CL_EPEERLOST);
    CHECK_EQ(atomic_load(&cl_member_of(team.groups[0])->eager.bytes), 0);
    go_on(&team);
}

/* ---- collectives ---- */

/* Once rank 1 has sent its part, it acknowledges nothing, as its engine is at a halt. */
static void halt_after_sending(struct team *team)
{
    struct cl_engine_stats stats = {0};
    for (uint32_t i = 0; i < 5000 && stats.payload_bytes_sent == 0; i++) {
        usleep(1000);
        CHECK_EQ(cl_engine_read_stats(team->world->engines[1], &stats), CL_OK);
    }
    halt(team);
}

/* Returns the operation of rank 1. */
static cl_operation *halt_in_call(struct team *team, struct call *call)
{
    cl_operation *operation;
    CHECK_EQ(submit_call(team, 1, call, PATIENCE_US, &operation), CL_OK);
    halt_after_sending(team);
    return operation;
}

TEST(test_a_collective_is_done_before_acknowledgements)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct call *calls[2] = {make_call(0, 3), make_call(1, 3)};
    cl_operation *own, *other = halt_in_call(&team, calls[1]);
    uint32_t word = 0;
    struct cl_operation_request request = request_of(&team, 0, calls[0], PATIENCE_US);
    request.done = &word;
    CHECK_EQ(cl_submit(team.groups[0], &request, &own), CL_OK);
    CHECK_EQ(cl_operation_wait(own, PATIENCE_US), CL_OK);
    CHECK_EQ(word, 1);
    check_call(calls[0], 2, 3);
    CHECK(atomic_load(&cl_member_of(team.groups[0])->eager.bytes) > 0);
    struct cl_operation_times times;
    CHECK_EQ(cl_operation_times(own, &times), CL_OK);
    CHECK(times.submitted_us > 0 && times.submitted_us <= times.first_us && times.first_us <= times.ended_us);
    memset(calls[0], 8, sizeof *calls[0]); /* its memory is the caller's again */
    word = 2;
    struct cl_engine_stats stats;
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &stats), CL_OK);
    CHECK_EQ(stats.operations_done, 1);
    go_on(&team);
    CHECK_EQ(finish(other), CL_OK);
    check_call(calls[1], 2, 3);
    cl_member_flush(cl_member_of(team.groups[0]));
    CHECK_EQ(atomic_load(&cl_member_of(team.groups[0])->eager.bytes), 0);
    CHECK_EQ(finish(own), CL_OK);
    CHECK_EQ(word, 2);
    CHECK_EQ(calls[0]->output[0], 0x08080808);
    CHECK_EQ(cl_engine_read_stats(world.engines[0], &stats), CL_OK);
    CHECK_EQ(stats.operations_done, 1);
    free(calls[0]);
    free(calls[1]);
}

/* What the plan leaves out stays as it is in the caller's memory. */
TEST(test_gaps_of_an_output)
{
    enum { BYTES = 64, AT = 32 };
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t in[2][BYTES], out[2][BYTES];
    cl_operation *operations[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        memset(in[rank], 1 + (int)rank, BYTES);
        memset(out[rank], 9, BYTES);
        struct draft draft = {.rank = rank, .world_size = 2, .input_bytes = BYTES, .output_bytes = BYTES};
        draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 1 - rank, .length = 4}, DRAFT_NONE);
        draft_add(&draft,
                  (struct cl_step){
                      .kind = CL_RECV_COPY, .peer = 1 - rank, .target = CL_OUTPUT, .target_offset = AT, .length = 4},
                  DRAFT_NONE);
        SCOPED_PLAN *plan = draft_finish(&draft);
        struct cl_operation_request request = {.plan = plan,
                                               .input = in[rank],
                                               .output = out[rank],
                                               .dtype = CL_U32,
                                               .op = CL_SUM,
                                               .timeout_us = PATIENCE_US};
        CHECK_EQ(cl_submit(team.groups[rank], &request, &operations[rank]), CL_OK);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        CHECK_EQ(finish(operations[rank]), CL_OK);
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint32_t i = 0; i < BYTES; i++)
            CHECK_EQ(out[rank][i], i >= AT && i < AT + 4 ? 2 - rank : 9);
}

/* A plan of a host queue: posts, and exchanges a word with the other rank, or only posts. */
static cl_plan *posting_plan(uint32_t rank, bool exchanges)
{
    struct draft draft = {.rank = rank, .world_size = 2, .input_bytes = 4, .output_bytes = 4};
    struct cl_step send = {.kind = CL_SEND, .peer = 1 - rank, .length = 4};
    struct cl_step receive = {.kind = CL_RECV_COPY, .peer = 1 - rank, .target = CL_OUTPUT, .length = 4};
    uint32_t post = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
    if (exchanges) {
        draft_add(&draft, send, post);
        draft_add(&draft, receive, post);
    }
    return draft_finish(&draft);
}

/* It leaves its host queue, too: the next one of that queue runs before the acknowledgements have come. */
TEST(test_the_next_operation_of_a_host_goes_on)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint32_t in[2] = {3, 4}, out[2] = {0, 0};
    cl_operation *own, *other;
    for (uint32_t rank = 0; rank < 2; rank++) {
        cl_plan_release(team.plans[rank]);
        team.plans[rank] = posting_plan(rank, true);
    }
    struct cl_operation_request request[2];
    for (uint32_t rank = 0; rank < 2; rank++)
        request[rank] = (struct cl_operation_request){.plan = team.plans[rank],
                                                      .input = &in[rank],
                                                      .output = &out[rank],
                                                      .dtype = CL_U32,
                                                      .op = CL_SUM,
                                                      .qos = {.priority = 4},
                                                      .timeout_us = PATIENCE_US};
    CHECK_EQ(cl_submit(team.groups[1], &request[1], &other), CL_OK);
    halt_after_sending(&team);
    CHECK_EQ(cl_submit(team.groups[0], &request[0], &own), CL_OK);
    CHECK_EQ(cl_operation_wait(own, PATIENCE_US), CL_OK);
    CHECK_EQ(out[0], 4);
    SCOPED_PLAN *post = posting_plan(0, false);
    struct cl_operation_request next = request[0];
    next.plan = post;
    CHECK_EQ(cl_run(team.groups[0], &next), CL_OK);
    CHECK(atomic_load(&cl_member_of(team.groups[0])->eager.bytes) > 0); /* that of the first one */
    go_on(&team);
    CHECK_EQ(finish(other), CL_OK);
    CHECK_EQ(out[1], 3);
    CHECK_EQ(finish(own), CL_OK);
}

/* The next operation has the error of a peer that is lost then. */
TEST(test_failure_after_the_end_of_a_collective)
{
    SCOPED_WORLD world = open_patient_world(2, "udp", PATIENCE_US);
    SCOPED_TEAM team = open_team(&world, 1, false);
    struct call *calls[2] = {make_call(0, 3), make_call(1, 3)};
    cl_operation *own, *other = halt_in_call(&team, calls[1]);
    CHECK_EQ(submit_call(&team, 0, calls[0], PATIENCE_US, &own), CL_OK);
    CHECK_EQ(cl_operation_wait(own, PATIENCE_US), CL_OK);
    pthread_mutex_lock(&world.engines[0]->core);
    cl_endpoint_peer_lost(world.engines[0]->endpoint, 1);
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_engine_wake(world.engines[0]);
    CHECK_EQ(run_call(&team, 0, calls[0], PATIENCE_US), CL_EPEERLOST);
    CHECK_EQ(cl_operation_status(own), CL_OK);
    CHECK_EQ(atomic_load(&cl_member_of(team.groups[0])->eager.bytes), 0);
    CHECK_EQ(finish(own), CL_OK);
    go_on(&team);
    cl_operation_wait(other, PATIENCE_US);
    cl_operation_release(other);
    free(calls[0]);
    free(calls[1]);
}
