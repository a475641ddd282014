/* Messages between ranks of one host: random traffic against an oracle, with and without reading of the sender's
 * memory. A rank moves messages only when it was woken, so a lost wake-up is a failure here. */
#include "group/channel.h"

#include <stdlib.h>
#include <string.h>

#include "commlayer.h"
#include "sim/random.h"
#include "tests/check.h"

enum {
    RANKS = 3,
    RING = 4096,
    TAGS = 4,
    MESSAGES_MAX = 400,
    LENGTH_MAX = 20000,
    TURNS_MOST = 100000,
    NOTHING = 0,
    REQUESTS = 1,
    ALL = 2,
};

struct town;

struct rank {
    struct town *town;
    struct cl_group_io io;
    struct cl_channels channels;
    uint32_t listens;
    bool awake, inside;
    uint64_t deadline_us;
    _Atomic uint32_t requests;
};

struct town {
    struct rank ranks[RANKS];
    uint32_t ring_bytes;
    uint8_t *rings;
    atomic_bool lost[RANKS];
    bool readable;   /* memory of the others */
    uint32_t prompt; /* this rank has a core of its own: it answers a request at once */
    uint64_t reads;
    bool dead[RANKS];
    int aborted;
    uint64_t now_us;
};

/* ---- surroundings ---- */

static int turn(struct town *town, uint32_t at, bool waiting);

static void notify(void *context, uint32_t index, bool at_once)
{
    const struct rank *rank = context;
    struct rank *other = &rank->town->ranks[index];
    if (at_once)
        atomic_fetch_add(&other->requests, 1);
    if (other->listens >= (at_once ? REQUESTS : ALL)) {
        other->listens = NOTHING;
        other->awake = true;
    }
    if (at_once && index == rank->town->prompt && !other->inside)
        CHECK_EQ(turn(rank->town, index, false), CL_OK);
}

static void listen_for(void *context, bool all)
{
    struct rank *rank = context;
    rank->listens = all ? ALL : REQUESTS;
}

static int read_memory(void *context, uint32_t index, uint64_t address, void *target, uint64_t bytes)
{
    const struct rank *rank = context;
    if (!rank->town->readable || rank->town->dead[index])
        return CL_ESYSTEM;
    rank->town->reads++;
    memcpy(target, (const void *)(uintptr_t)address, bytes);
    return CL_OK;
}

static bool is_gone(void *context, uint32_t index, uint64_t now_us)
{
    const struct rank *rank = context;
    (void)now_us;
    return rank->town->dead[index];
}

static int aborted(void *context, uint32_t *culprit)
{
    const struct rank *rank = context;
    *culprit = 0;
    return rank->town->aborted;
}

static struct town *found(uint32_t ring_bytes, bool readable)
{
    static const uint32_t local[RANKS] = {0, 1, 2};
    struct town *town = calloc(1, sizeof *town);
    size_t each = CL_RING_HEAD_BYTES + ring_bytes;
    town->ring_bytes = ring_bytes;
    town->rings = aligned_alloc(CL_RING_LINE_BYTES, RANKS * RANKS * each);
    memset(town->rings, 0, RANKS * RANKS * each);
    town->readable = readable;
    town->prompt = RANKS;
    for (uint32_t i = 0; i < RANKS; i++) {
        struct rank *rank = &town->ranks[i];
        rank->town = town;
        rank->listens = REQUESTS;
        rank->deadline_us = UINT64_MAX;
        rank->io = (struct cl_group_io){.context = rank,
                                        .notify = notify,
                                        .listen = listen_for,
                                        .read_memory = read_memory,
                                        .is_gone = is_gone,
                                        .aborted = aborted};
        struct cl_channels_options options = {
            .size = RANKS, .count = RANKS, .self = i, .local = local, .lost = town->lost, .io = &rank->io};
        CHECK_EQ(cl_channels_init(&rank->channels, &options), CL_OK);
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        cl_channels_listen(&town->ranks[i].channels, &town->ranks[i].requests);
        for (uint32_t j = 0; j < RANKS; j++)
            if (i != j)
                cl_channels_map(&town->ranks[i].channels, j, town->rings + (i * RANKS + j) * each,
                                town->rings + (j * RANKS + i) * each, ring_bytes);
    }
    return town;
}

static void abandon(struct town *const *town)
{
    for (uint32_t i = 0; i < RANKS; i++)
        cl_channels_free(&(*town)->ranks[i].channels);
    free((*town)->rings);
    free(*town);
}

#define SCOPED_TOWN SCOPED(abandon) struct town

/* One turn of a rank. Returns the status of its group. */
static int turn(struct town *town, uint32_t at, bool waiting)
{
    struct rank *rank = &town->ranks[at];
    bool more = false;
    uint32_t culprit;
    rank->awake = false;
    rank->inside = true;
    rank->deadline_us = UINT64_MAX;
    int status = cl_channels_progress(&rank->channels, town->now_us, waiting, &more, &rank->deadline_us, &culprit);
    rank->inside = false;
    rank->awake |= more || (status == CL_OK && !cl_channels_arm(&rank->channels, waiting));
    return status;
}

/* Gives each rank that is awake a turn until none is; then the clock goes on to the next deadline. */
static void settle(struct town *town)
{
    uint32_t turns = 0;
    for (; turns < TURNS_MOST; turns++) {
        uint32_t at = turns % RANKS;
        uint64_t next_us = UINT64_MAX;
        bool any = false;
        for (uint32_t i = 0; i < RANKS; i++) {
            any |= town->ranks[i].awake && !town->dead[i];
            if (!town->dead[i] && town->ranks[i].deadline_us < next_us)
                next_us = town->ranks[i].deadline_us;
        }
        if (!any && next_us == UINT64_MAX)
            return;
        if (!any)
            town->now_us = next_us;
        if (!town->dead[at] && (town->ranks[at].awake || town->ranks[at].deadline_us <= town->now_us))
            CHECK_EQ(turn(town, at, false), CL_OK);
    }
    CHECK(turns < TURNS_MOST); /* the ranks come to rest */
}

static void send(struct town *town, uint32_t from, uint32_t to, struct cl_transfer *transfer)
{
    struct rank *rank = &town->ranks[from];
    CHECK_EQ(cl_channel_send(&rank->channels, cl_channels_with(&rank->channels, to), transfer), CL_OK);
    rank->awake = true;
}

static int receive(struct town *town, uint32_t at, uint32_t from, struct cl_transfer *transfer)
{
    struct rank *rank = &town->ranks[at];
    int status = cl_channel_receive(&rank->channels, cl_channels_with(&rank->channels, from), transfer);
    rank->awake = true;
    return status;
}

/* ---- single messages ---- */

static struct cl_transfer part(uint8_t *memory, uint64_t length, uint32_t tag)
{
    return (struct cl_transfer){.memory = memory, .length = length, .tag = tag, .class = 4};
}

/* Small and large, the send first or the receive first, with and without reading of memory. */
TEST(test_one_message)
{
    static const uint64_t lengths[] = {0, 1, RING / 4, RING / 4 + 1, RING, 10 * RING + 5};
    for (uint32_t i = 0; i < 4 * sizeof lengths / sizeof *lengths; i++) {
        SCOPED_TOWN *town = found(RING, i % 2 == 0);
        uint64_t length = lengths[i / 4];
        uint8_t *data = malloc(length + 1), *target = calloc(1, length + 1);
        for (uint64_t j = 0; j < length; j++)
            data[j] = (uint8_t)(j * 31 + j / 256 + i);
        struct cl_transfer out = part(data, length, 7), in = part(target, length, 7);
        if (i % 4 < 2) {
            send(town, 0, 1, &out);
            settle(town);
            CHECK_EQ(out.status, CL_OK); /* in the ring, or copied when no receive came */
            CHECK_EQ(receive(town, 1, 0, &in), CL_OK);
        } else {
            CHECK_EQ(receive(town, 1, 0, &in), CL_OK);
            settle(town);
            CHECK_EQ(in.status, CL_EAGAIN);
            send(town, 0, 1, &out);
        }
        settle(town);
        CHECK_EQ(in.status, CL_OK);
        CHECK_EQ(out.status, CL_OK);
        CHECK(memcmp(data, target, length) == 0 && target[length] == 0);
        CHECK_EQ(town->reads > 0, i % 2 == 0 && length > RING / 4);
        CHECK_EQ(town->ranks[1].channels.kept_bytes, 0);
        free(data);
        free(target);
    }
}

/* Memory for messages without a receive is bounded. Then sends wait, small and large ones, but other messages pass. */
TEST(test_run_ahead_is_bounded)
{
    enum { SENDS = 3000, LENGTH = 900, LARGE = 9000, LIMIT = 100000 };
    SCOPED_TOWN *town = found(RING, true);
    town->ranks[1].channels.kept_limit_bytes = LIMIT;
    town->ranks[1].channels.list[0].granted_bytes = 0;
    size_t each = CL_RING_HEAD_BYTES + RING;
    cl_channels_map(&town->ranks[1].channels, 0, town->rings + 3 * each, town->rings + 1 * each, RING);
    static struct cl_transfer sends[SENDS], receives[SENDS];
    static uint8_t data[LARGE], target[LARGE];
    uint64_t early = 0;
    for (uint32_t i = 0; i < SENDS; i++) {
        sends[i] = part(data, i % 10 == 0 ? LARGE : i % 7 == 0 ? 0 : LENGTH, 1);
        send(town, 0, 1, &sends[i]);
    }
    settle(town);
    for (uint32_t i = 0; i < SENDS; i++)
        early += sends[i].status == CL_OK ? sends[i].length : 0;
    CHECK(early > LIMIT / 4);
    CHECK(early <= 2 * LIMIT);
    struct cl_transfer urgent = part(data, 10, 2), in = part(target, 10, 2);
    send(town, 0, 1, &urgent);
    CHECK_EQ(receive(town, 1, 0, &in), CL_OK);
    settle(town);
    CHECK_EQ(in.status, CL_OK);
    for (uint32_t i = 0; i < SENDS; i++) {
        receives[i] = part(target, sends[i].length, 1);
        CHECK_EQ(receive(town, 1, 0, &receives[i]), CL_OK);
    }
    settle(town);
    for (uint32_t i = 0; i < SENDS; i++)
        CHECK(sends[i].status == CL_OK && receives[i].status == CL_OK);
    CHECK_EQ(town->ranks[1].channels.kept_bytes, 0);
    CHECK(town->ranks[1].channels.list[0].incoming == NULL);
}

/* An urgent message is not behind a large one whose data goes through the same ring. */
TEST(test_urgent_data_overtakes_bulk)
{
    SCOPED_TOWN *town = found(RING, false);
    static uint8_t data[200 * RING], target[200 * RING], small[2 * RING], small_target[2 * RING];
    struct cl_transfer bulk = part(data, sizeof data, 1), urgent = part(small, sizeof small, 2);
    struct cl_transfer bulk_in = part(target, sizeof data, 1), urgent_in = part(small_target, sizeof small, 2);
    urgent.class = 0;
    receive(town, 1, 0, &bulk_in);
    receive(town, 1, 0, &urgent_in);
    send(town, 0, 1, &bulk);
    for (uint32_t i = 0; i < 10; i++) {
        turn(town, 0, false);
        turn(town, 1, false);
    }
    CHECK(bulk.moved > 0);
    send(town, 0, 1, &urgent);
    uint64_t before = bulk.moved;
    for (uint32_t i = 0; urgent_in.status != CL_OK && i < 1000; i++) {
        turn(town, 0, false);
        turn(town, 1, false);
    }
    CHECK_EQ(urgent_in.status, CL_OK);
    CHECK(bulk.moved - before <= 2 * RING); /* from before the receiver asked for the urgent one */
    settle(town);
    CHECK_EQ(bulk_in.status, CL_OK);
}

/* ... nor behind a large one of another rank. */
TEST(test_urgent_offer_overtakes_bulk_of_another_rank)
{
    enum { BULK = 8 << 20 };
    for (uint32_t first = 0; first < 2; first++) {
        SCOPED_TOWN *town = found(RING, true);
        static uint8_t data[BULK], target[BULK], small[2 * RING], small_target[2 * RING];
        struct cl_transfer bulk = part(data, BULK, 1), bulk_in = part(target, BULK, 1);
        struct cl_transfer urgent = part(small, sizeof small, 1), urgent_in = part(small_target, sizeof small, 1);
        urgent.class = 0;
        receive(town, 2, first, &bulk_in);
        receive(town, 2, 1 - first, &urgent_in);
        send(town, first, 2, &bulk);
        send(town, 1 - first, 2, &urgent);
        turn(town, first, false);
        turn(town, 1 - first, false);
        turn(town, 2, false);
        CHECK_EQ(urgent_in.status, CL_OK);
        CHECK_EQ(bulk_in.status, CL_EAGAIN);
        settle(town);
        CHECK_EQ(bulk_in.status, CL_OK);
        CHECK_EQ(urgent.status, CL_OK);
    }
}

/* Ranks that send equally urgent data share the receiver's time. */
TEST(test_equal_offers_take_turns)
{
    enum { BULK = 8 << 20, TURNS = 4 };
    SCOPED_TOWN *town = found(RING, true);
    static uint8_t data[BULK], targets[2][BULK];
    struct cl_transfer out[2], in[2];
    for (uint32_t from = 0; from < 2; from++) {
        out[from] = part(data, BULK, 1);
        in[from] = part(targets[from], BULK, 1);
        receive(town, 2, from, &in[from]);
        send(town, from, 2, &out[from]);
        turn(town, from, false);
    }
    for (uint32_t turns = 0; turns < TURNS; turns++)
        turn(town, 2, false);
    for (uint32_t from = 0; from < 2; from++)
        CHECK_EQ(town->ranks[2].channels.list[from].incoming->moved, TURNS * (1 << 20) / 2);
    settle(town);
    CHECK(in[0].status == CL_OK && in[1].status == CL_OK);
}

/* A turn ends although the writer goes on writing as fast as this rank reads. */
TEST(test_a_turn_is_bounded)
{
    enum { BULK = 16 << 20, MOST = 1 << 20 };
    SCOPED_TOWN *town = found(RING, false);
    uint8_t *data = calloc(1, BULK), *target = calloc(1, BULK);
    struct cl_transfer out = part(data, BULK, 1), in = part(target, BULK, 1);
    town->prompt = 0;
    receive(town, 1, 0, &in);
    send(town, 0, 1, &out);
    turn(town, 0, false);
    for (uint32_t turns = 0; out.status == CL_EAGAIN && turns < 1000; turns++) {
        uint64_t before = out.moved;
        turn(town, turns % 2, false);
        CHECK(out.moved - before <= MOST);
    }
    settle(town);
    CHECK_EQ(out.status, CL_OK);
    CHECK_EQ(in.status, CL_OK);
    free(data);
    free(target);
}

/* A rank that has nothing in flight also takes an offer that one turn does not come to. */
TEST(test_an_idle_rank_reads_on)
{
    enum { SENDS = 600, LENGTH = 1000, LARGE = 100000 };
    SCOPED_TOWN *town = found(1 << 20, true);
    static struct cl_transfer sends[SENDS];
    static uint8_t data[LARGE];
    for (uint32_t i = 0; i < SENDS; i++) {
        sends[i] = part(data, LENGTH, 1);
        send(town, 0, 1, &sends[i]);
    }
    struct cl_transfer offered = part(data, LARGE, 1);
    send(town, 0, 1, &offered);
    settle(town);
    CHECK_EQ(offered.status, CL_OK);
}

TEST(test_mismatch)
{
    for (uint32_t i = 0; i < 8; i++) {
        SCOPED_TOWN *town = found(RING, i % 2 == 0);
        static uint8_t data[2 * RING], target[2 * RING];
        struct cl_transfer out = part(data, i < 4 ? 10 : 2 * RING, 1), in = part(target, 11, 1);
        int status = CL_OK;
        if (i / 2 % 2 == 0)
            status = receive(town, 1, 0, &in);
        send(town, 0, 1, &out);
        CHECK_EQ(turn(town, 0, false), CL_OK);
        if (i / 2 % 2 == 1) {
            CHECK_EQ(turn(town, 1, true), CL_OK);
            status = receive(town, 1, 0, &in);
        } else {
            CHECK_EQ(status, CL_OK);
            status = turn(town, 1, false);
        }
        CHECK_EQ(status, CL_EMISMATCH);
        CHECK_EQ(in.status, CL_EMISMATCH);
    }
}

/* ---- failures ---- */

/* The receiver gets the messages that the dead rank had written completely. */
TEST(test_death_of_the_sender)
{
    for (uint32_t i = 0; i < 4; i++) {
        SCOPED_TOWN *town = found(RING, i % 2 == 0);
        static uint8_t data[20 * RING], target[20 * RING];
        memset(data, 1, sizeof data);
        memset(target, 0, sizeof target);
        struct cl_transfer first = part(data, 100, 1), second = part(data, sizeof data, 1);
        struct cl_transfer first_in = part(target, 100, 1), second_in = part(target + 100, sizeof data, 1);
        second_in.memory = target;
        send(town, 0, 1, &first);
        send(town, 0, 1, &second);
        turn(town, 0, false);
        for (uint32_t turns = 0; i >= 2 && turns < 3; turns++) { /* in the middle of the second */
            if (turns == 0) {
                receive(town, 1, 0, &first_in);
                receive(town, 1, 0, &second_in);
            }
            if (i % 2 == 1) {
                turn(town, 1, false);
                turn(town, 0, false);
            }
        }
        town->dead[0] = true;
        atomic_store(&town->lost[0], true);
        int status = CL_OK;
        if (i < 2) {
            receive(town, 1, 0, &first_in);
            status = turn(town, 1, false);
            CHECK_EQ(status, CL_OK);
            CHECK_EQ(first_in.status, CL_OK);
            receive(town, 1, 0, &second_in);
        }
        for (uint32_t turns = 0; turns < 20 && status == CL_OK; turns++)
            status = turn(town, 1, false);
        CHECK_EQ(status, CL_EPEERLOST);
        CHECK_EQ(first_in.status, CL_OK);
        CHECK_EQ(second_in.status, CL_EPEERLOST);
    }
}

TEST(test_death_of_the_receiver)
{
    SCOPED_TOWN *town = found(RING, true);
    static uint8_t data[20 * RING];
    struct cl_transfer small = part(data, 100, 1), large = part(data, sizeof data, 1);
    town->dead[1] = true;
    send(town, 0, 1, &small);
    CHECK_EQ(small.status, CL_OK); /* as if it had died just afterwards */
    CHECK_EQ(turn(town, 0, false), CL_OK);
    send(town, 0, 1, &large);
    CHECK_EQ(turn(town, 0, false), CL_EPEERLOST);
    CHECK_EQ(large.status, CL_EPEERLOST);
}

/* A sender that gives up frees its memory: bytes read from there after the abort are not delivered. */
TEST(test_abort_while_memory_is_read)
{
    SCOPED_TOWN *town = found(RING, true);
    static uint8_t data[2 * RING], target[2 * RING];
    struct cl_transfer out = part(data, sizeof data, 1), in = part(target, sizeof target, 1);
    receive(town, 1, 0, &in);
    send(town, 0, 1, &out);
    turn(town, 0, false);
    town->aborted = CL_EABORTED;
    for (uint32_t i = 0; i < 5; i++)
        turn(town, 1, false);
    CHECK_EQ(in.status, CL_EAGAIN);
    cl_channels_forget(&town->ranks[1].channels);
    cl_channels_forget(&town->ranks[0].channels);
}

/* Entries that no correct rank writes fail the group, and touch no memory that is not theirs. */
TEST(test_wrong_entries)
{
    static const struct cl_ring_entry wrong[] = {
        {.kind = 0},
        {.kind = CL_RING_TAKEN + 1},
        {.kind = CL_RING_EAGER, .tag = 1, .length = 100},        /* more than the entry has */
        {.kind = CL_RING_EAGER, .tag = 2, .length = UINT64_MAX}, /* ... and without a receive */
        {.kind = CL_RING_OFFER, .tag = 1, .length = UINT64_MAX},
        {.kind = CL_RING_DATA, .number = 1, .length = 1},
        {.kind = CL_RING_STREAM, .number = 1},
        {.kind = CL_RING_TAKEN, .number = 1},
    };
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        SCOPED_TOWN *town = found(RING, true);
        uint8_t target[100];
        struct cl_transfer in = part(target, sizeof target, 1);
        receive(town, 1, 0, &in);
        CHECK(cl_ring_write(&town->ranks[0].channels.list[1].out, &wrong[i], NULL, 0));
        CHECK_EQ(turn(town, 1, false), CL_EMISMATCH);
    }
}

/* The bound of memory holds for a rank that ignores it, too. */
TEST(test_more_than_was_granted)
{
    SCOPED_TOWN *town = found(RING, true);
    static const uint8_t data[RING / 4];
    struct cl_ring_entry entry = {.kind = CL_RING_EAGER, .tag = 1, .length = sizeof data};
    int status = CL_OK;
    for (uint64_t bytes = 0; status == CL_OK && bytes < 32 << 20; bytes += sizeof data) {
        CHECK(cl_ring_write(&town->ranks[0].channels.list[1].out, &entry, data, sizeof data));
        status = turn(town, 1, true);
    }
    CHECK_EQ(status, CL_EMISMATCH);
}

/* ---- random traffic ---- */

struct message {
    uint32_t from, to, tag;
    struct cl_transfer out, in;
    bool sent, posted;
};

static uint8_t content(uint32_t number, uint64_t at)
{
    return (uint8_t)(sim_mix(number * 65536 + at / 8) >> at % 8 * 8);
}

/* Sends and receives in random order, each side in the order of the messages per tag, as the oracle assumes: the n-th
 * receive from a rank with a tag gets the n-th message that this rank sent with it. Random turns come between them. */
static void converse(uint64_t seed)
{
    struct sim_random random = sim_random_seeded(seed, 0);
    uint32_t count = 1 + (uint32_t)sim_random_below(&random, MESSAGES_MAX), left = 2 * count;
    uint32_t ring = 2048u << sim_random_below(&random, 3);
    SCOPED_TOWN *town = found(ring, sim_random_chance(&random, 0.5));
    struct message *messages = calloc(count, sizeof *messages);
    for (uint32_t i = 0; i < count; i++) {
        struct message *message = &messages[i];
        message->from = (uint32_t)sim_random_below(&random, RANKS);
        message->to = (message->from + 1 + (uint32_t)sim_random_below(&random, RANKS - 1)) % RANKS;
        message->tag = (uint32_t)sim_random_below(&random, TAGS);
        uint64_t length = (uint64_t)sim_random_scale(&random, 1, LENGTH_MAX) - sim_random_chance(&random, 0.1);
        message->out = part(malloc(length + 1), length, message->tag);
        message->in = part(calloc(1, length + 1), length, message->tag);
        message->out.class = (uint8_t)sim_random_below(&random, 8);
        for (uint64_t j = 0; j < length; j++)
            message->out.memory[j] = content(i, j);
    }
    while (left > 0) { /* any rank does its next thing, in the order of its sends, and of its receives */
        uint32_t rank = (uint32_t)sim_random_below(&random, RANKS);
        bool sends = sim_random_chance(&random, 0.5);
        for (uint32_t i = 0; i < count; i++) {
            struct message *message = &messages[i];
            if (sends && message->from == rank && !message->sent) {
                message->sent = true;
                left--;
                send(town, rank, message->to, &message->out);
                break;
            }
            if (!sends && message->to == rank && !message->posted) {
                message->posted = true;
                left--;
                CHECK_EQ(receive(town, rank, message->from, &message->in), CL_OK);
                break;
            }
        }
        town->now_us += sim_random_below(&random, 300);
        for (uint64_t turns = sim_random_below(&random, 3); turns > 0; turns--)
            CHECK_EQ(turn(town, (uint32_t)sim_random_below(&random, RANKS), false), CL_OK);
    }
    settle(town);
    uint32_t wrong = 0, open = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct message *message = &messages[i];
        open += message->out.status != CL_OK || message->in.status != CL_OK;
        for (uint64_t j = 0; j < message->in.length; j++)
            wrong += message->in.memory[j] != content(i, j);
        free(message->out.memory);
        free(message->in.memory);
    }
    CHECK_EQ(open, 0);
    CHECK_EQ(wrong, 0);
    for (uint32_t i = 0; i < RANKS; i++) {
        CHECK_EQ(town->ranks[i].channels.in_flight, 0);
        CHECK_EQ(town->ranks[i].channels.fetching, 0);
        CHECK_EQ(town->ranks[i].channels.undecided, 0);
        CHECK_EQ(town->ranks[i].channels.kept_bytes, 0);
    }
    free(messages);
}

TEST(test_random_traffic)
{
    for (uint64_t seed = 1; seed <= 300; seed++) {
        int before = check_failures;
        converse(seed);
        if (check_failures != before)
            fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
    }
}
