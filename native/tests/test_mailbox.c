/* Point-to-point messages by name, between endpoints in virtual time: order, any source, room, loss. */
#include "group/mailbox.h"

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "tests/check.h"
#include "tests/network.h"

enum { GROUP = 3, FOREVER_US = 60000000, RECEIVES_MAX = 256, LENGTH_MAX = 40000, LIMIT = 16000 };

static const uint16_t peers[] = {0, 1, 2, 3, 4, 5, 6, 7};

/* One rank: what the engine does, in small. */
struct rank {
    struct network *network;
    struct network_host *host;
    struct cl_mailbox mailbox;
    struct receive {
        struct cl_ticket ticket; /* first: tickets are receives */
        bool bound;
        uint32_t length, messages, done;
        uint8_t bytes[LENGTH_MAX];
    } * receives;
    uint32_t receive_count;
    uint32_t bound_order[RECEIVES_MAX], bound_count;
};

struct town {
    struct network *network;
    struct rank ranks[4];
    uint32_t size;
    struct letter {
        struct letter *next;
        uint8_t bytes[LENGTH_MAX];
    } * letters; /* everything sent */
};

static void post(struct rank *rank, struct receive *receive)
{
    uint64_t now_us = network_now_us(rank->network);
    receive->bound = true;
    rank->bound_order[rank->bound_count++] = (uint32_t)(receive - rank->receives);
    for (uint32_t i = 0; i < receive->messages; i++) {
        struct cl_message_id id = {rank->mailbox.group, receive->ticket.tag, receive->ticket.index + i};
        uint32_t length = i + 1 < receive->messages ? LIMIT : receive->length - i * LIMIT;
        CHECK_EQ(cl_endpoint_post_receive(rank->host->endpoint, peers[receive->ticket.source], id,
                                          (struct cl_sink){.target = receive->bytes + (size_t)i * LIMIT}, length,
                                          &RELIABLE, now_us, receive),
                 CL_OK);
    }
}

static struct receive *receive(struct town *town, uint32_t at, uint32_t source, uint32_t tag, uint32_t length)
{
    struct rank *rank = &town->ranks[at];
    struct receive *made = &rank->receives[rank->receive_count++];
    *made = (struct receive){.ticket = {.source = source, .tag = tag},
                             .length = length,
                             .messages = (uint32_t)cl_mailbox_messages(length, LIMIT)};
    int status = cl_mailbox_receive(&rank->mailbox, &made->ticket, network_now_us(town->network));
    CHECK(status == CL_OK || status == CL_EAGAIN);
    if (status == CL_OK)
        post(rank, made);
    network_wake(town->network, at);
    return made;
}

static uint8_t content(uint32_t from, uint32_t number)
{
    return (uint8_t)(1 + 31 * from + number);
}

static void send(struct town *town, uint32_t from, uint32_t to, uint32_t tag, uint32_t length, uint8_t value)
{
    struct rank *rank = &town->ranks[from];
    struct letter *letter = malloc(sizeof *letter);
    memset(letter->bytes, value, LENGTH_MAX);
    letter->next = town->letters;
    town->letters = letter;
    uint32_t index, messages = (uint32_t)cl_mailbox_messages(length, LIMIT);
    CHECK(cl_mailbox_send(&rank->mailbox, to, tag, messages, &index));
    for (uint32_t i = 0; i < messages; i++) {
        struct cl_message_id id = {rank->mailbox.group, tag, index + i};
        CHECK_EQ(cl_endpoint_post_send(rank->host->endpoint, peers[to], id, letter->bytes + (size_t)i * LIMIT,
                                       i + 1 < messages ? LIMIT : length - i * LIMIT, &(struct cl_qos){.priority = 4},
                                       network_now_us(town->network), NULL),
                 CL_OK);
    }
    network_wake(town->network, from);
}

static void on_completion(struct network_host *host, const struct cl_completion *completion)
{
    const struct rank *rank = host->argument;
    for (uint32_t i = 0; i < rank->receive_count; i++)
        if (completion->context == &rank->receives[i])
            rank->receives[i].done++;
}

static struct town *found(uint32_t size, double mbit_per_s, size_t unexpected_limit_bytes, uint64_t seed)
{
    struct town *town = calloc(1, sizeof *town);
    town->size = size;
    town->network = network_new(size, 1, mbit_per_s, 64, unexpected_limit_bytes, seed);
    for (uint32_t i = 0; i < size; i++) {
        struct rank *rank = &town->ranks[i];
        rank->network = town->network;
        rank->host = &town->network->hosts[i];
        rank->host->argument = rank;
        rank->host->on_completion = on_completion;
        rank->receives = calloc(RECEIVES_MAX, sizeof *rank->receives);
        cl_mailbox_init(&rank->mailbox, rank->host->endpoint, GROUP, size, peers);
    }
    return town;
}

static void abandon(struct town *const *abandoned)
{
    struct town *town = *abandoned;
    for (uint32_t i = 0; i < town->size; i++) {
        cl_mailbox_free(&town->ranks[i].mailbox);
        free(town->ranks[i].receives);
    }
    for (struct letter *letter = town->letters, *next; letter != NULL; letter = next) {
        next = letter->next;
        free(letter);
    }
    network_free(town->network);
    free(town);
}

#define SCOPED_TOWN SCOPED(abandon) struct town

static void match(struct town *town)
{
    struct cl_ticket *ticket;
    for (uint32_t i = 0; i < town->size; i++)
        while ((ticket = cl_mailbox_next(&town->ranks[i].mailbox)) != NULL) {
            post(&town->ranks[i], (struct receive *)(void *)ticket);
            network_wake(town->network, i);
        }
}

static bool all_received(const struct town *town)
{
    for (uint32_t i = 0; i < town->size; i++)
        for (uint32_t j = 0; j < town->ranks[i].receive_count; j++)
            if (!town->ranks[i].receives[j].bound ||
                town->ranks[i].receives[j].done < town->ranks[i].receives[j].messages)
                return false;
    return true;
}

/* Runs until every receive has ended; false: they did not. */
static bool settle(struct town *town)
{
    uint64_t until_us = network_now_us(town->network) + FOREVER_US;
    while (!all_received(town)) {
        if (!network_step(town->network, until_us))
            return false;
        match(town);
    }
    return true;
}

static void pass(struct town *town, uint64_t us)
{
    uint64_t until_us = network_now_us(town->network) + us;
    while (network_step(town->network, until_us))
        match(town);
}

static void check_bytes(const struct receive *receive, uint8_t value)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < receive->length; i++)
        wrong += receive->bytes[i] != value;
    CHECK_EQ(wrong, 0);
    CHECK_EQ(receive->bytes[receive->length], 0); /* and not a byte more */
}

/* Messages of one tag come in order, of different tags in any; before their receives and after them; both ways. */
TEST(test_order_per_tag)
{
    enum { MESSAGES = 60, TAGS = 3 };
    SCOPED_TOWN *town = found(2, 1000, 1 << 20, 1);
    network_set_noise(town->network,
                      (struct sim_noise){.reorder = 0.5, .reorder_ns = 2000000, .loss = 0.2, .duplicate = 0.1});
    for (uint32_t early = 0; early < 2; early++) {
        for (uint32_t i = 0; early == 0 && i < MESSAGES; i++)
            for (uint32_t rank = 0; rank < 2; rank++)
                receive(town, rank, 1 - rank, i % TAGS, 100 * i);
        for (uint32_t i = 0; i < MESSAGES; i++)
            for (uint32_t rank = 0; rank < 2; rank++)
                send(town, rank, 1 - rank, i % TAGS, 100 * i, content(rank, i));
        if (early)
            pass(town, 3000000);
        for (uint32_t tag = TAGS; early == 1 && tag-- > 0;)
            for (uint32_t i = tag; i < MESSAGES; i += TAGS)
                for (uint32_t rank = 0; rank < 2; rank++)
                    receive(town, rank, 1 - rank, tag, 100 * i);
        CHECK(settle(town));
        for (uint32_t rank = 0; rank < 2; rank++)
            for (uint32_t i = 0; i < MESSAGES; i++) {
                const struct receive *got = &town->ranks[rank].receives[early * MESSAGES + i];
                check_bytes(got, content(1 - rank, got->length / 100));
            }
    }
}

/* Every message has a tag of its own, many more of them than a history of ranges would hold; repetitions of old packets
 * are no new messages. */
TEST(test_many_tags)
{
    enum { ROUNDS = 60, TAGS = 100 };
    SCOPED_TOWN *town = found(2, 1000, 1 << 20, 2);
    struct rank *to = &town->ranks[1];
    network_set_noise(town->network,
                      (struct sim_noise){.duplicate = 0.5,
                                         .reorder = 0.2,
                                         .reorder_ns = 50000000,
                                         .loss = 0.05}); /* far enough to meet the round after the next */
    for (uint32_t round = 0; round < ROUNDS; round++) {
        to->receive_count = to->bound_count = 0;
        for (uint32_t i = 0; i < TAGS; i++)
            send(town, 0, 1, round * TAGS + i, 8, content(0, round + i));
        for (uint32_t i = TAGS; i-- > 0;)
            receive(town, 1, 0, round * TAGS + i, 8);
        CHECK(settle(town));
        for (uint32_t i = 0; i < TAGS; i++)
            check_bytes(&to->receives[i], content(0, round + TAGS - 1 - i));
    }
    pass(town, 1000000);
    CHECK(to->host->endpoint->announcements.messages.first == NULL);
    CHECK_EQ(town->ranks[0].mailbox.sent[1].count, 1);
    CHECK_EQ(to->host->endpoint->peers.list[0]->history.groups[0].posted.count, 1);
}

TEST(test_index_wraps)
{
    SCOPED_TOWN *town = found(2, 1000, 1 << 20, 3);
    struct cl_message_id first = {GROUP | CL_GROUP_P2P, 9, 0};
    uint32_t index;
    CHECK(cl_mailbox_send(&town->ranks[0].mailbox, 1, 9, UINT32_MAX - 1, &index));
    CHECK(cl_history_add_posted(&town->network->hosts[1].endpoint->peers.list[0]->history, &first));
    town->network->hosts[1].endpoint->peers.list[0]->history.groups[0].posted.runs[0].messages = UINT32_MAX - 1;
    for (uint32_t i = 0; i < 5; i++) {
        send(town, 0, 1, 9, 50, content(0, i));
        receive(town, 1, 0, 9, 50);
    }
    CHECK(settle(town));
    for (uint32_t i = 0; i < 5; i++)
        check_bytes(&town->ranks[1].receives[i], content(0, i));
    CHECK_EQ(town->ranks[1].receives[4].ticket.index, 2);
}

/* Three senders, a lossy network, receives before and after: every message once, each sender's in order. */
TEST(test_any_source)
{
    enum { MESSAGES = 20 };
    for (uint64_t seed = 0; seed < 10; seed++) {
        SCOPED_TOWN *town = found(4, 1000, 1 << 20, seed);
        const struct rank *to = &town->ranks[3];
        network_set_noise(town->network, (struct sim_noise){.loss = 0.1, .reorder = 0.3, .reorder_ns = 3000000});
        for (uint32_t i = 0; i < MESSAGES; i++)
            receive(town, 3, CL_ANY_SOURCE, 5, 4000);
        for (uint32_t i = 0; i < 2 * MESSAGES; i++)
            for (uint32_t rank = 0; rank < 3; rank++)
                send(town, rank, 3, 5, 4000, content(rank, i));
        for (uint32_t i = MESSAGES; i < 6 * MESSAGES; i++)
            receive(town, 3, CL_ANY_SOURCE, 5, 4000);
        CHECK(settle(town));
        uint32_t numbers[3] = {0};
        for (uint32_t i = 0; i < 6 * MESSAGES; i++) {
            uint32_t source = to->receives[i].ticket.source;
            CHECK_EQ(to->bound_order[i], i);
            check_bytes(&to->receives[i], content(source, numbers[source]++));
        }
        CHECK(to->mailbox.queues == NULL && to->host->endpoint->announcements.wanted_count == 0);
    }
}

/* Nobody who sends much may keep the others waiting: who came first is first. */
TEST(test_any_source_is_fair)
{
    SCOPED_TOWN *town = found(3, 1000, 1 << 20, 4);
    for (uint32_t i = 0; i < 10; i++) {
        send(town, 0, 2, 0, 10, content(0, i));
        if (i == 1)
            send(town, 1, 2, 0, 10, content(1, 0));
        pass(town, 10000);
    }
    for (uint32_t i = 0; i < 11; i++)
        CHECK_EQ(receive(town, 2, CL_ANY_SOURCE, 0, 10)->ticket.source, i == 2);
    CHECK(settle(town));
}

/* A receive from a given rank waits behind one from any source, which was called first; other tags do not. */
TEST(test_given_source_waits_its_turn)
{
    SCOPED_TOWN *town = found(3, 1000, 1 << 20, 5);
    const struct receive *any = receive(town, 2, CL_ANY_SOURCE, 7, 10);
    const struct receive *given = receive(town, 2, 0, 7, 10);
    const struct receive *other = receive(town, 2, 0, 8, 10);
    const struct receive *last = receive(town, 2, CL_ANY_SOURCE, 7, 10);
    CHECK(!any->bound && !given->bound && other->bound && !last->bound);
    send(town, 0, 2, 8, 10, 80);
    send(town, 0, 2, 7, 10, 70);
    pass(town, 100000);
    CHECK(any->bound && given->bound && !last->bound);
    check_bytes(any, 70);
    check_bytes(other, 80);
    send(town, 1, 2, 7, 10, 71);
    send(town, 0, 2, 7, 10, 72);
    CHECK(settle(town));
    check_bytes(given, 72);
    check_bytes(last, 71);
    CHECK_EQ(last->ticket.source, 1);
}

/* Unexpected packets fill their memory. A message that a receive waits for arrives all the same, before or after the
 * receive is posted, and no unexpected packet is lost. */
TEST(test_no_room)
{
    enum { FILLERS = 20 };
    for (uint32_t late = 0; late < 2; late++) {
        SCOPED_TOWN *town = found(3, 1000, 10000, 6 + late);
        const struct rank *to = &town->ranks[2];
        for (uint32_t i = 0; i < FILLERS; i++)
            send(town, i % 2, 2, 1, 3000, content(i % 2, i / 2));
        pass(town, 500000);
        const struct receive *any = late ? NULL : receive(town, 2, CL_ANY_SOURCE, 2, 5000);
        send(town, 0, 2, 2, 5000, 99);
        send(town, 1, 2, 2, 5000, 98);
        pass(town, late ? 500000 : 0);
        uint64_t start_us = network_now_us(town->network);
        if (late)
            any = receive(town, 2, CL_ANY_SOURCE, 2, 5000);
        CHECK(settle(town));
        CHECK(any->bound);
        CHECK(network_now_us(town->network) - start_us < 5000); /* the senders were asked, not found by trial */
        check_bytes(any, any->ticket.source == 0 ? 99 : 98);
        CHECK(town->network->hosts[2].endpoint->stats.packets_unexpected_dropped > 0);
        for (uint32_t i = 0; i < FILLERS; i++)
            receive(town, 2, CL_ANY_SOURCE, 1, 3000);
        receive(town, 2, 1 - any->ticket.source, 2, 5000);
        CHECK(settle(town));
        uint32_t numbers[2] = {0};
        for (uint32_t i = 1; i <= FILLERS; i++) {
            uint32_t source = to->receives[i].ticket.source;
            check_bytes(&to->receives[i], content(source, numbers[source]++));
        }
    }
}

/* What was heard of only because somebody waited leaves nothing behind when nobody does any more. */
TEST(test_no_room_and_nobody_waits)
{
    SCOPED_TOWN *town = found(3, 1000, 1600, 8); /* room for one packet */
    const struct cl_endpoint *endpoint = town->network->hosts[2].endpoint;
    send(town, 0, 2, 1, 10, 1);
    pass(town, 100000);
    struct cl_ticket waiting = {.source = CL_ANY_SOURCE, .tag = 2};
    CHECK_EQ(cl_mailbox_receive(&town->ranks[2].mailbox, &waiting, network_now_us(town->network)), CL_EAGAIN);
    send(town, 0, 2, 2, 10, 2);
    send(town, 1, 2, 2, 10, 3);
    network_run_until(town->network, network_now_us(town->network) + 100000);
    CHECK_EQ(endpoint->table.names.count, 3);
    cl_mailbox_free(&town->ranks[2].mailbox);
    CHECK_EQ(endpoint->table.names.count, 1);
    CHECK(endpoint->announcements.messages.first == endpoint->announcements.messages.last &&
          endpoint->announcements.messages.first != NULL);
    CHECK_EQ(endpoint->announcements.wanted_count, 0);
}

TEST(test_long_transfers)
{
    static const uint32_t lengths[] = {0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT, 2 * LIMIT + 777};
    enum { COUNT = sizeof lengths / sizeof *lengths };
    SCOPED_TOWN *town = found(3, 1000, 1 << 20, 9);
    network_set_noise(town->network, (struct sim_noise){.loss = 0.02});
    for (uint32_t i = 0; i < COUNT; i++)
        for (uint32_t rank = 0; rank < 2; rank++)
            send(town, rank, 2, i, lengths[i], content(rank, i));
    for (uint32_t i = 0; i < COUNT; i++) {
        receive(town, 2, CL_ANY_SOURCE, i, lengths[i]);
        receive(town, 2, CL_ANY_SOURCE, i, lengths[i]);
    }
    CHECK(settle(town));
    uint32_t of_first = 0;
    for (uint32_t i = 0; i < 2 * COUNT; i++) {
        const struct receive *got = &town->ranks[2].receives[i];
        of_first += got->ticket.source == 0;
        CHECK_EQ(got->done, got->messages);
        check_bytes(got, content(got->ticket.source, i / 2));
    }
    CHECK_EQ(of_first, COUNT);
}

/* Lengths that agree on every message but not on the whole must not pass: the worst are multiples of the limit. */
TEST(test_mismatch)
{
    static const uint32_t lengths[] = {0, 100, LIMIT, LIMIT + 100, 2 * LIMIT};
    for (size_t i = 0; i < 5; i++)
        for (size_t j = 0; j < 5; j++) {
            if (i == j)
                continue;
            SCOPED_TOWN *town = found(2, 1000, 1 << 20, 10);
            const struct receive *got = receive(town, 1, 0, 1, lengths[j]);
            send(town, 0, 1, 1, lengths[i], 5);
            pass(town, 1000000);
            CHECK_EQ(town->network->hosts[0].failed, 1);
            CHECK_EQ(town->network->hosts[1].failed, 1);
            CHECK(got->bound);
        }
}

/* A receive out of its turn would lose messages: refused. */
TEST(test_posting_out_of_turn)
{
    SCOPED_TOWN *town = found(2, 1000, 1 << 20, 11);
    struct cl_endpoint *endpoint = town->network->hosts[1].endpoint;
    uint8_t byte;
    struct cl_sink sink = {.target = &byte};
    struct cl_message_id id = {GROUP | CL_GROUP_P2P, 1, 1};
    uint64_t now_us = network_now_us(town->network);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 0, id, sink, 1, &RELIABLE, now_us, NULL), CL_EINVAL);
    id.index = 0;
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 0, id, sink, 1, &RELIABLE, now_us, NULL), CL_OK);
    CHECK_EQ(cl_endpoint_post_receive(endpoint, 0, id, sink, 1, &RELIABLE, now_us, NULL), CL_EINVAL);
}

/* What ends the group ends its point-to-point messages, here and there, and what comes later. */
TEST(test_end_of_the_group)
{
    SCOPED_TOWN *town = found(2, 1000, 1 << 20, 12);
    receive(town, 1, 0, 1, 10);
    send(town, 1, 0, 2, 10, 1);
    pass(town, 100000);
    cl_endpoint_abort(town->network->hosts[0].endpoint, GROUP, &peers[1], 1, CL_ETIMEDOUT, UINT16_MAX);
    network_wake(town->network, 0);
    pass(town, 100000);
    CHECK_EQ(town->network->hosts[1].last_status, CL_EABORTED);
    CHECK(town->network->hosts[0].endpoint->announcements.messages.first == NULL);
    struct cl_message_id id = {GROUP | CL_GROUP_P2P, 1, 1};
    struct cl_sink nowhere = {0};
    CHECK_EQ(cl_endpoint_post_receive(town->network->hosts[1].endpoint, 0, id, nowhere, 0, &RELIABLE,
                                      network_now_us(town->network), NULL),
             CL_EABORTED);
    cl_endpoint_cancel(town->network->hosts[1].endpoint, GROUP, UINT32_MAX);
    CHECK_EQ(town->network->hosts[1].endpoint->peers.list[0]->history.count, 0);
}

/* What a rank had sent before it died is there for those who come later; what it had not, ends with an error. */
TEST(test_lost_peer)
{
    SCOPED_TOWN *town = found(3, 1000, 6000, 13);
    struct network_host *host = &town->network->hosts[2];
    send(town, 0, 2, 1, 10, 41);
    send(town, 0, 2, 1, 15000, 42); /* there is no room for all of it before its receive */
    pass(town, 500000);
    const struct receive *posted = receive(town, 2, 0, 3, 10);
    const struct receive *from_any = NULL;
    cl_endpoint_peer_lost(host->endpoint, 0);
    pass(town, 1000);
    CHECK(posted->bound);
    CHECK_EQ(host->failed, 1);
    from_any = receive(town, 2, CL_ANY_SOURCE, 1, 10);
    pass(town, 1000);
    CHECK_EQ(from_any->done, 1);
    check_bytes(from_any, 41);
    CHECK_EQ(host->failed, 1);
    receive(town, 2, 0, 1, 15000);
    pass(town, 1000);
    CHECK_EQ(host->last_status, CL_EPEERLOST);
    CHECK_EQ(host->endpoint->unexpected.used_bytes, 0);
    struct cl_message_id id = {GROUP | CL_GROUP_P2P, 50, 0};
    struct cl_sink nowhere = {0};
    CHECK_EQ(
        cl_endpoint_post_receive(host->endpoint, 0, id, nowhere, 0, &RELIABLE, network_now_us(town->network), NULL),
        CL_EPEERLOST);
}

/* Who waits for anybody learns that nobody is left, be they dead or silent; one that lives is enough to go on. */
TEST(test_deserted)
{
    SCOPED_TOWN *town = found(3, 1000, 1 << 20, 14);
    const struct cl_mailbox *mailbox = &town->ranks[2].mailbox;
    pass(town, 5000000);
    CHECK(!cl_mailbox_deserted(mailbox, network_now_us(town->network)));
    receive(town, 2, CL_ANY_SOURCE, 1, 10);
    cl_endpoint_peer_lost(town->network->hosts[2].endpoint, 0);
    pass(town, 10000000);
    CHECK(!cl_mailbox_deserted(mailbox, network_now_us(town->network)));
    sim_driver_kill(&town->network->hosts[1].driver);
    pass(town, 1000000);
    CHECK(!cl_mailbox_deserted(mailbox, network_now_us(town->network)));
    pass(town, 3000000);
    CHECK(cl_mailbox_deserted(mailbox, network_now_us(town->network)));
}
