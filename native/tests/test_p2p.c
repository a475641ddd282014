/* Point-to-point operations, with threads as ranks: over memory that loses packets and over UDP on loopback, in groups
 * that share memory and in groups that do not. */
#include "engine/member.h"
#include "protocol/endpoint_state.h"
#include "tests/world.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 40 << 20, MESSAGE = 16 << 20 };

/* The rank it came from. */
static uint32_t finish_receive(cl_operation *operation)
{
    uint32_t source = UINT32_MAX;
    CHECK_EQ(cl_operation_wait(operation, 0), CL_OK);
    CHECK_EQ(cl_operation_source(operation, &source), CL_OK);
    cl_operation_release(operation);
    return source;
}

/* ---- order ---- */

enum { MESSAGES = 120, TAGS = 4, BYTES_MAX = 9000 };

struct talk {
    struct team *team;
    uint32_t rank;
    pthread_t thread;
};

static uint32_t length_of(uint32_t number)
{
    return number * 7919 % BYTES_MAX;
}

/* Sends to and receives from the next rank, tags interleaved, half of the receives before and half after the sends. */
static void *converse(void *argument)
{
    const struct talk *talk = argument;
    struct team *team = talk->team;
    uint32_t other = (talk->rank + 1) % team->world->size, wrong = 0;
    uint8_t(*in)[BYTES_MAX] = malloc(MESSAGES * sizeof *in), (*out)[BYTES_MAX] = malloc(MESSAGES * sizeof *out);
    cl_operation *receives[MESSAGES], *sends[MESSAGES];
    for (uint32_t half = 0; half < 2; half++) {
        for (uint32_t i = half * MESSAGES / 2; i < (half + 1) * MESSAGES / 2; i++) {
            uint32_t from = (talk->rank + team->world->size - 1) % team->world->size;
            receives[i] = start_receive(team, talk->rank, from, i % TAGS, in[i], length_of(i), PATIENCE_US);
        }
        for (uint32_t i = 0; half == 0 && i < MESSAGES; i++) {
            memset(out[i], (int)(talk->rank + i), BYTES_MAX);
            sends[i] = start_send(team, talk->rank, other, i % TAGS, out[i], length_of(i), PATIENCE_US);
        }
    }
    for (uint32_t i = 0; i < MESSAGES; i++) {
        uint32_t from = finish_receive(receives[i]);
        for (uint32_t j = 0; j < length_of(i); j++)
            wrong += in[i][j] != (uint8_t)(from + i);
        CHECK_EQ(finish(sends[i]), CL_OK);
    }
    CHECK_EQ(wrong, 0);
    free(in);
    free(out);
    return NULL;
}

/* ... while collectives run on the same group. */
static void converse_on(uint32_t size, const char *wire, double loss, bool shared)
{
    SCOPED_WORLD world = open_world(size, wire, loss);
    SCOPED_TEAM team = open_team(&world, 1, shared);
    struct talk talks[RANKS_MAX];
    struct job jobs[RANKS_MAX];
    for (uint32_t rank = 0; rank < size; rank++) {
        talks[rank] = (struct talk){.team = &team, .rank = rank};
        jobs[rank] =
            (struct job){.team = &team, .rank = rank, .rounds = 20, .submit_every = 3, .timeout_us = PATIENCE_US};
        pthread_create(&talks[rank].thread, NULL, converse, &talks[rank]);
    }
    run_jobs(jobs, size);
    for (uint32_t rank = 0; rank < size; rank++)
        pthread_join(talks[rank].thread, NULL);
    for (uint32_t rank = 0; rank < size; rank++)
        CHECK_EQ(cl_group_status(team.groups[rank], NULL), CL_OK);
}

TEST(test_order_and_directions)
{
    converse_on(2, "mem", LOSS, false);
    converse_on(3, "mem", LOSS, true);
    converse_on(3, "udp", 0, true);
}

TEST(test_empty_messages)
{
    SCOPED_WORLD world = open_world(2, "mem", LOSS);
    SCOPED_TEAM team = open_team(&world, 1, false);
    for (int i = 0; i < 10; i++) {
        cl_operation *receive = start_receive(&team, 1, i % 2 == 0 ? 0 : UINT32_MAX, 1, NULL, 0, PATIENCE_US);
        CHECK_EQ(finish(start_send(&team, 0, 1, 1, NULL, 0, PATIENCE_US)), CL_OK);
        CHECK_EQ(finish_receive(receive), 0);
    }
}

/* ---- any source ---- */

static void *send_all(void *argument)
{
    const struct talk *talk = argument;
    uint32_t values[MESSAGES];
    for (uint32_t i = 0; i < MESSAGES; i++) {
        values[i] = 1000 * talk->rank + i;
        CHECK_EQ(finish(start_send(talk->team, talk->rank, 0, 3, &values[i], sizeof *values, PATIENCE_US)), CL_OK);
    }
    return NULL;
}

TEST(test_any_source)
{
    SCOPED_WORLD world = open_world(4, "mem", LOSS);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct talk talks[4];
    cl_operation *operations[3 * MESSAGES];
    uint32_t values[3 * MESSAGES], next[4] = {0};
    for (uint32_t i = 0; i < MESSAGES; i++) /* some are waiting, the others come later */
        operations[i] = start_receive(&team, 0, UINT32_MAX, 3, &values[i], sizeof *values, PATIENCE_US);
    for (uint32_t rank = 1; rank < 4; rank++) {
        talks[rank] = (struct talk){.team = &team, .rank = rank};
        pthread_create(&talks[rank].thread, NULL, send_all, &talks[rank]);
    }
    for (uint32_t i = 0; i < 3 * MESSAGES; i++) {
        if (i >= MESSAGES)
            operations[i] = start_receive(&team, 0, UINT32_MAX, 3, &values[i], sizeof *values, PATIENCE_US);
        uint32_t source = finish_receive(operations[i]);
        CHECK_EQ(values[i], 1000 * source + next[source]++);
    }
    for (uint32_t rank = 1; rank < 4; rank++) {
        CHECK_EQ(next[rank], MESSAGES);
        pthread_join(talks[rank].thread, NULL);
    }
}

/* ---- large ones, which are cut ---- */

static uint8_t *fill(uint64_t length, uint32_t seed)
{
    uint8_t *bytes = malloc(length);
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)((i >> 12) * 37 + i + seed);
    return bytes;
}

TEST(test_large)
{
    static const uint64_t lengths[] = {LARGE + 1, 2 * MESSAGE};
    SCOPED_WORLD world = open_world(2, "udp", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t length = lengths[i];
        uint8_t *data[2] = {fill(length, 0), fill(length, 1)}, *targets[2] = {malloc(length), malloc(length)};
        cl_operation *operations[4];
        for (uint32_t rank = 0; rank < 2; rank++) { /* both ways at once, the second from any source */
            uint32_t from = rank == 0 ? 1 : UINT32_MAX;
            operations[2 * rank] = start_send(&team, rank, 1 - rank, i, data[rank], length, PATIENCE_US);
            operations[2 * rank + 1] = start_receive(&team, rank, from, i, targets[rank], length, PATIENCE_US);
        }
        for (uint32_t j = 0; j < 4; j++)
            CHECK_EQ(finish(operations[j]), CL_OK);
        for (uint32_t rank = 0; rank < 2; rank++) {
            CHECK(memcmp(targets[rank], data[1 - rank], length) == 0);
            free(targets[rank]);
        }
        free(data[0]);
        free(data[1]);
    }
}

/* ---- failures ---- */

TEST(test_bad_arguments)
{
    struct world world = open_world(2, "mem", 0), alone = open_world(1, "none", 0);
    struct team team = open_team(&world, 1, false), no_network = open_team(&alone, 1, false);
    cl_group *group = team.groups[0];
    cl_operation *operation;
    uint32_t rank;
    char byte = 0;
    const struct cl_message_request good = {.rank = 1, .memory = &byte, .length = 1};
    struct cl_message_request request;
    CHECK_EQ(cl_send(NULL, &good, &operation), CL_EINVAL);
    CHECK_EQ(cl_send(group, NULL, &operation), CL_EINVAL);
    CHECK_EQ(cl_send(group, &good, NULL), CL_EINVAL);
#define REFUSED(function, change)                                                                                      \
    do {                                                                                                               \
        request = good;                                                                                                \
        change;                                                                                                        \
        CHECK_EQ(function(group, &request, &operation), CL_EINVAL);                                                    \
    } while (0)
    REFUSED(cl_send, request.rank = 0); /* to itself */
    REFUSED(cl_send, request.rank = 2);
    REFUSED(cl_send, request.rank = UINT32_MAX);
    REFUSED(cl_send, request.tag = UINT32_MAX);
    REFUSED(cl_send, request.memory = NULL);
    REFUSED(cl_send, request.priority = CL_CLASS_YIELDS + 1);
    REFUSED(cl_send, request.length = UINT64_MAX);
    REFUSED(cl_receive, request.rank = 0);
    REFUSED(cl_receive, request.rank = 2);
    CHECK_EQ(cl_send(no_network.groups[0], &good, &operation), CL_EINVAL);
    CHECK_EQ(cl_group_status(group, NULL), CL_OK); /* none of it harmed the group */
    operation = start_send(&team, 0, 1, 0, &byte, 1, PATIENCE_US);
    CHECK_EQ(cl_operation_source(operation, &rank), CL_EINVAL);
    CHECK_EQ(finish(operation), CL_OK);
    operation = start_receive(&team, 0, 1, 0, &byte, 1, PATIENCE_US);
    CHECK_EQ(cl_operation_source(operation, &rank), CL_EAGAIN);
    CHECK_EQ(finish(start_send(&team, 1, 0, 0, &byte, 1, PATIENCE_US)), CL_OK);
    CHECK_EQ(finish_receive(operation), 1);
    struct cl_group_options options = group_options(&world, CL_GROUP_P2P | 5, 0, -1);
    CHECK_EQ(cl_group_open(world.engines[0], &options, &group), CL_EINVAL);
    close_team(&team);
    close_team(&no_network);
    close_world(&world);
    close_world(&alone);
}

/* Both sides learn it, whichever of them came first, and whatever is cut how. */
TEST(test_mismatch)
{
    static const uint64_t lengths[][2] = {{8, 4}, {0, 4}, {MESSAGE, 2 * MESSAGE}, {2 * MESSAGE, MESSAGE}};
    uint8_t *memory = calloc(2, MESSAGE), *target = calloc(2, MESSAGE);
    for (size_t i = 0; i < 8; i++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, true);
        cl_operation *operations[2], *other = start_receive(&team, 0, 1, 77, NULL, 0, PATIENCE_US);
        for (size_t j = 0; j < 2; j++) {
            bool sends = j == i % 2;
            operations[j] = sends ? start_send(&team, 0, 1, 1, memory, lengths[i / 2][0], PATIENCE_US)
                                  : start_receive(&team, 1, 0, 1, target, lengths[i / 2][1], PATIENCE_US);
            usleep(1000);
        }
        CHECK_EQ(finish(operations[1 - i % 2]), CL_EMISMATCH);
        CHECK_EQ(finish(other), CL_EMISMATCH);
        int sent = finish(operations[i % 2]);
        CHECK(sent == CL_EMISMATCH || (sent == CL_OK && lengths[i / 2][0] < MESSAGE)); /* small ones end early */
        for (uint32_t rank = 0; rank < 2; rank++)
            CHECK_EQ(cl_group_status(team.groups[rank], NULL), CL_EMISMATCH);
    }
    free(memory);
    free(target);
}

static void time_out(uint32_t source)
{
    SCOPED_WORLD world = open_world(3, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint32_t words[4] = {0}, culprit = 9;
    cl_operation *there = start_receive(&team, 2, 1, 5, &words[0], 4, PATIENCE_US);
    cl_operation *first = start_receive(&team, 0, source, 5, &words[1], 4, 50000);
    cl_operation *second = start_receive(&team, 0, 2, 5, &words[2], 4, PATIENCE_US);
    CHECK_EQ(finish(first), CL_ETIMEDOUT);
    CHECK_EQ(finish(second), CL_ETIMEDOUT);
    CHECK_EQ(finish(there), CL_EABORTED);
    CHECK_EQ(cl_group_status(team.groups[0], &culprit), CL_ETIMEDOUT);
    CHECK_EQ(culprit, source);
    CHECK_EQ(finish(start_send(&team, 0, 1, 5, words, 4, 0)), CL_ETIMEDOUT); /* and ever after, at once */
}

TEST(test_timeout)
{
    time_out(1);
    time_out(UINT32_MAX);
}

/* A send that nobody receives, too large for the receiver's unexpected packets. */
TEST(test_timeout_of_a_send)
{
    SCOPED_WORLD world = open_world(2, "mem", 0);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint8_t *data = calloc(1, 4 << 20);
    CHECK_EQ(finish(start_send(&team, 0, 1, 5, data, 4 << 20, 100000)), CL_ETIMEDOUT);
    free(data);
}

/* Ranks of one host that wait for packets only do not look at the memory they share: they must be told, too. Their
 * engines ask nobody anything for so long that only the news can wake them. */
TEST(test_abort)
{
    SCOPED_WORLD world = open_patient_world(3, "mem", 600000000);
    SCOPED_TEAM team = open_team(&world, 1, true);
    uint32_t words[3] = {0};
    cl_operation *operations[3];
    usleep(50000);
    for (uint32_t rank = 1; rank < 3; rank++)
        operations[rank] = start_receive(&team, rank, rank == 1 ? 2 : UINT32_MAX, 5, &words[rank], 4, PATIENCE_US);
    usleep(50000);
    uint64_t start_us = cl_now_us();
    cl_group_abort(team.groups[0], CL_EABORTED);
    for (uint32_t rank = 1; rank < 3; rank++)
        CHECK_EQ(finish(operations[rank]), CL_EABORTED);
    CHECK(cl_now_us() - start_us < PATIENCE_US / 2); /* at their timeout they would look */
}

/* Large messages are on their way both in and out when the group closes: the memory is the caller's again at once. */
TEST(test_close_with_messages_in_flight)
{
    for (uint32_t round = 0; round < 6; round++) {
        SCOPED_WORLD world = open_world(3, "mem", LOSS);
        SCOPED_TEAM team = open_team(&world, 1, round % 2 == 0);
        uint8_t *data = calloc(1, LARGE), *targets[2] = {calloc(1, LARGE), calloc(1, LARGE)};
        cl_operation *out = start_send(&team, 0, 1, 1, data, LARGE, PATIENCE_US);
        cl_operation *in = start_receive(&team, 0, 2, 1, targets[0], LARGE, PATIENCE_US);
        cl_operation *never = start_receive(&team, 0, UINT32_MAX, 2, targets[0], 8, PATIENCE_US);
        cl_operation *to = start_receive(&team, 1, 0, 1, targets[1], LARGE, PATIENCE_US);
        cl_operation *from = start_send(&team, 2, 0, 1, data, LARGE, PATIENCE_US);
        usleep(1000 * round);
        cl_group_close(team.groups[0]);
        team.groups[0] = NULL;
        free(targets[0]);
        CHECK_EQ(finish(out), CL_ECLOSED);
        CHECK_EQ(finish(in), CL_ECLOSED);
        CHECK_EQ(finish(never), CL_ECLOSED);
        CHECK_EQ(finish(to), CL_EABORTED);
        int sent = finish(from);
        CHECK(sent == CL_EABORTED || sent == CL_OK); /* what is for a closed group is taken and thrown away */
        free(targets[1]);
        free(data);
    }
}

/* The death of a process of this host ends what is to come from it at once; what it had sent is still there. */
TEST(test_death)
{
    SCOPED_WORLD world = open_patient_world(3, "mem", 600000000);
    SCOPED_TEAM team = open_team(&world, 1, true);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 1, child), CL_OK);
    CHECK_EQ(cl_engine_read_meter(world.engines[0], 1, cl_engine_meter(world.engines[1])),
             CL_OK); /* the child has it */
    CHECK(world.engines[0]->peers.watched[0].meter.lines != NULL);
    uint32_t sent = 4711, words[3] = {0}, culprit = 9;
    CHECK_EQ(finish(start_send(&team, 1, 0, 8, &sent, 4, PATIENCE_US)), CL_OK);
    cl_operation *any = start_receive(&team, 0, UINT32_MAX, 9, &words[1], 4, PATIENCE_US);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    for (bool alive = true; alive; usleep(1000)) {
        pthread_mutex_lock(&world.engines[0]->core);
        alive = world.engines[0]->endpoint->peers.list[1]->alive;
        CHECK(alive || world.engines[0]->peers.watched[0].meter.lines == NULL);
        pthread_mutex_unlock(&world.engines[0]->core);
    }
    CHECK_EQ(cl_operation_status(any), CL_EAGAIN); /* rank 2 may still send it */
    CHECK_EQ(finish_receive(start_receive(&team, 0, 1, 8, &words[0], 4, PATIENCE_US)), 1);
    CHECK_EQ(words[0], 4711);
    CHECK_EQ(finish(start_receive(&team, 0, 1, 8, &words[2], 4, PATIENCE_US)), CL_EPEERLOST);
    CHECK_EQ(finish(any), CL_EPEERLOST);
    CHECK_EQ(cl_group_status(team.groups[0], &culprit), CL_EPEERLOST);
    CHECK_EQ(culprit, 1);
}

/* A rank dies after it has taken the wish of rank 0 for its bell, and before it rings. So nobody rings for rank 1,
 * which cannot go on alone. */
TEST(test_death_before_a_ring)
{
    enum { HANG_US = 5000000 };
    SCOPED_WORLD world = open_patient_world(3, "mem", 600000000);
    SCOPED_TEAM team = open_team(&world, 1, true);
    struct cl_doorbell *doorbell = cl_host_doorbell(cl_member_of(team.groups[0])->host, 0);
    uint8_t *data = calloc(1, LARGE);
    pid_t child = fork();
    if (child == 0)
        for (;;)
            pause();
    CHECK_EQ(cl_engine_watch_process(world.engines[0], 2, child), CL_OK);
    for (bool awake = true; awake; usleep(1000)) {
        pthread_mutex_lock(&world.engines[0]->core);
        awake = team.groups[0]->awake;
        pthread_mutex_unlock(&world.engines[0]->core);
    }
    atomic_fetch_add(&doorbell->requests, 1);
    atomic_fetch_add(&doorbell->rings, 1);
    CHECK_EQ(atomic_exchange(&doorbell->wish, CL_DOORBELL_NONE), CL_DOORBELL_REQUESTS);
    cl_operation *send = start_send(&team, 1, 0, 1, data, MESSAGE, PATIENCE_US);
    CHECK_EQ(cl_operation_wait(send, 20000), CL_EAGAIN);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    CHECK_EQ(cl_operation_wait(send, HANG_US), CL_OK);
    cl_operation_release(send);
    free(data);
}

TEST(test_nobody_left)
{
    SCOPED_WORLD world = open_patient_world(2, "mem", 600000000);
    SCOPED_TEAM team = open_team(&world, 1, false);
    uint32_t word, culprit = 9;
    cl_operation *any = start_receive(&team, 0, UINT32_MAX, 9, &word, 4, PATIENCE_US);
    usleep(10000);
    pthread_mutex_lock(&world.engines[0]->core);
    cl_endpoint_peer_lost(world.engines[0]->endpoint, 1);
    pthread_mutex_unlock(&world.engines[0]->core);
    cl_engine_wake(world.engines[0]);
    CHECK_EQ(finish(any), CL_EPEERLOST);
    CHECK_EQ(cl_group_status(team.groups[0], &culprit), CL_EPEERLOST);
    CHECK_EQ(culprit, 1);
}

/* ---- plans that send to ranks of this host and share memory with them, too ---- */

static void open_mixed_plans(struct team *team)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct draft draft = {
            .rank = rank, .world_size = 2, .input_bytes = 4, .output_bytes = 4, .staging_bytes = STAGING};
        uint32_t last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 1}, DRAFT_NONE);
        last = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1 - rank, .message = 1}, last);
        last = draft_add(&draft,
                         rank == 0 ? (struct cl_step){.kind = CL_SEND, .peer = 1, .length = 4}
                                   : (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = 4},
                         last);
        last = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = rank, .message = 2}, last);
        draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 1 - rank, .message = 2}, last);
        cl_plan_release(team->plans[rank]);
        team->plans[rank] = draft_finish(&draft);
        CHECK(team->plans[rank] != NULL);
    }
}

TEST(test_mixed_plans)
{
    for (uint32_t abort = 0; abort < 2; abort++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, true);
        open_mixed_plans(&team);
        struct call *calls[2];
        cl_operation *operations[2];
        for (uint32_t round = 0; round < 5 && !abort; round++) {
            for (uint32_t rank = 0; rank < 2; rank++) {
                calls[rank] = make_call(rank, round);
                CHECK_EQ(submit_call(&team, rank, calls[rank], PATIENCE_US, &operations[rank]), CL_OK);
            }
            for (uint32_t rank = 0; rank < 2; rank++)
                CHECK_EQ(finish(operations[rank]), CL_OK);
            CHECK_EQ(calls[1]->output[0], calls[0]->input[0]);
            free(calls[0]);
            free(calls[1]);
        }
        calls[1] = make_call(1, 0);
        CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
        usleep(10000);
        cl_group_abort(team.groups[0], CL_EABORTED);
        CHECK_EQ(finish(operations[1]), CL_EABORTED);
        free(calls[1]);
    }
}
