#include "protocol/path.h"

#include <stddef.h>

#include "tests/check.h"

enum { BYTES = 1472 };

static struct cl_nic nic;
static struct cl_path path;
static uint32_t acked, refused, lost, late;

static void count(void *argument, const struct cl_sent_packet *packet)
{
    (void)packet;
    (*(uint32_t *)argument)++;
}
static void on_acked(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    count(&acked, packet);
}
static void on_refused(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    count(&refused, packet);
}
static void on_lost(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    count(&lost, packet);
}
static void on_late(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    count(&late, packet);
}
static const struct cl_path_callbacks CALLBACKS = {on_acked, on_refused, on_lost, on_late, NULL};

static void start(uint32_t packets)
{
    cl_path_free(&path);
    cl_congestion_nic_init(&nic.congestion, cl_congestion_find(NULL), BYTES);
    cl_path_init(&path, 0, &nic, BYTES);
    acked = refused = lost = late = 0;
    for (uint32_t i = 0; i < packets; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = BYTES, .sent_us = 1000 + i};
        CHECK(cl_sent_push(&path.sent, &packet));
    }
}

/* An acknowledgement of what `ack` has seen, arriving at now_us. */
static bool deliver(struct cl_ack *ack, uint64_t now_us)
{
    struct cl_packet packet = {.kind = CL_PACKET_ACK};
    uint8_t payload[CL_ACK_BYTES_MAX];
    cl_ack_write(ack, &packet, payload, now_us);
    return cl_path_on_ack(&path, &packet, payload, now_us, now_us, &CALLBACKS);
}

TEST(test_each_packet_has_one_outcome)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    start(10);
    static const uint64_t CAME[] = {1, 2, 4, 5, 6, 7, 9};
    for (int i = 0; i < 7; i++)
        cl_ack_on_packet(&ack, CAME[i], CAME[i] == 4, false, 1500, 1500);
    CHECK(deliver(&ack, 1800));
    CHECK_EQ(acked, 6);
    CHECK_EQ(refused, 1);
    CHECK_EQ(lost, 2); /* 0 and 3; 8 may be late */
    CHECK_EQ(path.sent.packets, 1);
    CHECK(deliver(&ack, 1800)); /* the same acknowledgement again changes nothing */
    CHECK_EQ(acked + refused + lost, 9);
    cl_ack_on_packet(&ack, 3, false, false, 1900, 1900);
    CHECK(deliver(&ack, 2000));
    CHECK_EQ(late, 1);
}

/* Marks count once, whatever happens to acknowledgements; an overtaken acknowledgement does not lower the count. */
TEST(test_marks)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    start(10);
    ack.marked = CL_ACK_MARKS - 1;
    path.marked = CL_ACK_MARKS - 1;
    cl_ack_on_packet(&ack, 0, false, false, 1500, 1500);
    CHECK(deliver(&ack, 1600));
    CHECK_EQ(path.congestion.delay.cc.marked_part, 0);
    CHECK(!nic.congestion.delay.egress.marked);
    ack.marked += 3; /* and it wraps */
    cl_ack_on_packet(&ack, 1, false, false, 1500, 1500);
    CHECK(deliver(&ack, 1700));
    CHECK_EQ(path.marked, 2);
    CHECK(path.congestion.delay.cc.marked_part > 0);
    CHECK(nic.congestion.delay.egress.marked);
    uint64_t window = path.congestion.delay.cc.window;
    ack.marked -= 1;
    cl_ack_on_packet(&ack, 2, false, false, 1500, 1500);
    CHECK(deliver(&ack, 1800));
    CHECK_EQ(path.marked, 2);
    CHECK(path.congestion.delay.cc.window >= window);
}

TEST(test_acknowledgement_revives)
{
    SCOPED(cl_ack_free) struct cl_ack ack;
    cl_ack_init(&ack);
    start(2);
    cl_path_on_pto(&path, 1000);
    cl_path_on_pto(&path, 1000);
    CHECK(path.probe);
    CHECK_EQ(path.loss.pto_count, 2);
    path.dead = true;
    cl_ack_on_packet(&ack, 1, false, false, 1500, 1500);
    CHECK(deliver(&ack, 1600));
    CHECK_EQ(path.loss.pto_count, 0);
    CHECK(!path.dead && !path.probe);
    CHECK_EQ(path.delivered_us, 1600);
}

TEST(test_malformed_changes_nothing)
{
    start(2);
    struct cl_packet packet = {.kind = CL_PACKET_ACK, .number = 7, .offset = 1, .length = 4};
    static const uint8_t PAYLOAD[] = {0, 0, 1, 0};
    CHECK(!cl_path_on_ack(&path, &packet, PAYLOAD, 2000, 2000, &CALLBACKS));
    CHECK_EQ(path.sent.packets, 2);
}

/* The sender asks several times per window, and at least once in a full one. */
TEST(test_asks)
{
    start(0);
    uint32_t asked = 0;
    for (uint32_t i = 0; i < 32; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = BYTES};
        asked += cl_path_asks(&path, 0, 2 * BYTES);
        cl_sent_push(&path.sent, &packet);
    }
    CHECK(asked >= 3 && asked <= 16);
    for (uint32_t i = 32; i < 1032; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = BYTES};
        asked += cl_path_asks(&path, 0, 2 * BYTES);
        cl_sent_push(&path.sent, &packet);
    }
    CHECK(asked < 32 + 1000 / 8 && asked > 1000 / CL_PATH_ACK_EVERY_MAX);
}

static void fly(uint8_t class, uint32_t count)
{
    struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = BYTES, .class = class};
    for (uint32_t i = 0; i < count; i++)
        cl_sent_push(&path.sent, &packet);
}

/* A window full of bulk has room for urgent packets, but none for more bulk until both fit. */
TEST(test_urgent_does_not_wait_for_the_window)
{
    start(0);
    path.congestion.delay.cc.window = 40 * BYTES;
    fly(4, 40);
    CHECK(!cl_path_open(&path, 4, BYTES));
    CHECK(cl_path_open(&path, 3, BYTES));
    fly(3, 40);
    CHECK(!cl_path_open(&path, 3, BYTES));
    while (path.sent.low < 79)
        cl_sent_remove(&path.sent, path.sent.low);
    CHECK(cl_path_open(&path, 4, BYTES));
    start(0);
    path.congestion.delay.cc.window = 2 * BYTES; /* bulk's queue made the window that small */
    fly(3, 2);
    CHECK(!cl_path_open(&path, 3, BYTES)); /* without other classes in flight, the window is the limit */
    fly(4, 1);
    fly(3, CL_DELAY_URGENT_PACKETS - 3);
    CHECK(cl_path_open(&path, 3, BYTES));
    fly(3, 1);
    CHECK(!cl_path_open(&path, 3, BYTES));
}

TEST(test_deadline_is_the_earliest)
{
    start(0);
    CHECK_EQ(cl_path_deadline_us(&path), UINT64_MAX);
    cl_ack_on_packet(&path.ack, 0, false, false, 5000, 5000);
    CHECK_EQ(cl_path_deadline_us(&path), 5000 + CL_ACK_DELAY_US);
    struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = BYTES, .sent_us = 1000};
    cl_sent_push(&path.sent, &packet);
    CHECK_EQ(cl_path_deadline_us(&path), cl_loss_pto_us(&path.loss, &path.sent, &path.rtt));
    path.dead = true;
    path.next_probe_us = 2000;
    CHECK_EQ(cl_path_deadline_us(&path), 2000);
}
