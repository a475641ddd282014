/* The end of an operation: its caller learns of it after the other ranks have the acknowledgement. */
#include "group/news.h"

#include <semaphore.h>

#include "protocol/packet.h"
#include "tests/world.h"

enum { ROUNDS = 20, BYTES = 100 };

/* A wire at whose gate the first datagrams with an acknowledgement wait. */
static struct gate {
    atomic_bool shut;
    struct cl_wire *wire;
    sem_t reached, opened;
} gate;

static size_t send_through_gate(struct cl_wire *wire, const struct cl_wire_datagram *datagrams, size_t count)
{
    bool acknowledges = false;
    for (size_t i = 0; i < count; i++)
        acknowledges |= cl_packet_kind(datagrams[i].head) == CL_PACKET_ACK;
    if (acknowledges && wire == gate.wire && atomic_exchange(&gate.shut, false)) {
        sem_post(&gate.reached);
        sem_wait(&gate.opened);
    }
    return mem_wire.send(wire, datagrams, count);
}

TEST(test_the_acknowledgement_leaves_first)
{
    struct cl_wire_type wire_type = mem_wire;
    wire_type.send = send_through_gate;
    struct cl_engine_options options = options_of("mem", 0);
    options.wire_type = &wire_type;
    sem_init(&gate.reached, 0, 0);
    sem_init(&gate.opened, 0, 0);
    SCOPED_WORLD world = open_world_of(2, options);
    SCOPED_TEAM team = open_team(&world, 1, false);
    gate.wire = world.engines[1]->ports.wire;
    for (uint32_t round = 0; round < ROUNDS; round++) { /* at first, greetings are acknowledged, too */
        uint8_t sent[BYTES] = {1}, received[BYTES] = {0};
        struct cl_message_request send = {.rank = 1, .tag = 5, .memory = sent, .length = BYTES, .priority = 4},
                                  receive = {.rank = 0, .tag = 5, .memory = received, .length = BYTES, .priority = 4};
        cl_operation *sending, *receiving;
        CHECK_EQ(cl_receive(team.groups[1], &receive, &receiving), CL_OK);
        atomic_store(&gate.shut, true);
        CHECK_EQ(cl_send(team.groups[0], &send, &sending), CL_OK);
        sem_wait(&gate.reached);
        CHECK_EQ(cl_operation_status(receiving), CL_EAGAIN);
        sem_post(&gate.opened);
        CHECK_EQ(cl_operation_wait(receiving, PATIENCE_US), CL_OK);
        CHECK_EQ(cl_operation_wait(sending, PATIENCE_US), CL_OK);
        cl_operation_release(receiving);
        cl_operation_release(sending);
    }
}

static struct cl_news_item *told[3];
static uint32_t told_count;

static void note(struct cl_news_item *item)
{
    told[told_count++] = item;
    item->next = NULL; /* it may be freed */
}

TEST(test_news_are_told_once_and_in_order)
{
    struct cl_news news = {0};
    struct cl_news_item items[3] = {{.tell = note}, {.tell = note}, {.tell = note}};
    cl_news_tell(&news);
    for (uint32_t i = 0; i < 3; i++)
        cl_news_add(&news, &items[i]);
    cl_news_tell(&news);
    cl_news_tell(&news);
    CHECK_EQ(told_count, 3);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(told[i] == &items[i]);
}
