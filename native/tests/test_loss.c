#include "protocol/loss.h"

#include <stdbool.h>
#include <stddef.h>

#include "protocol/packet.h"
#include "tests/check.h"

static struct cl_sent sent;
static struct cl_loss loss;
static struct cl_rtt rtt;
static uint32_t lost_count, late_count;

static void on_lost(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    (void)packet;
    lost_count++;
}

static void on_late(void *argument, const struct cl_sent_packet *packet)
{
    (void)argument;
    (void)packet;
    late_count++;
}

/* `count` packets, one per 10 us from 0 on, over a path with a round trip of 800 us. */
static void start(uint32_t count)
{
    cl_sent_free(&sent);
    sent = (struct cl_sent){0};
    cl_loss_init(&loss);
    cl_rtt_init(&rtt);
    cl_rtt_update(&rtt, 0, 800, 0, 0);
    lost_count = late_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = 1000, .sent_us = 10 * i};
        cl_sent_push(&sent, &packet);
    }
}

static void acknowledge(uint64_t number)
{
    struct cl_sent_packet *packet = cl_sent_find(&sent, number);
    cl_loss_on_acked(&loss, number, packet != NULL ? packet->class : 0);
    if (packet != NULL)
        cl_sent_remove(&sent, number);
}

static void detect(uint64_t now_us)
{
    cl_loss_detect(&loss, &sent, &rtt, now_us, on_lost, NULL);
}

TEST(test_packet_threshold)
{
    start(10);
    detect(100000);
    CHECK_EQ(lost_count, 0); /* without acknowledgements no packet counts as lost */
    acknowledge(2);
    detect(500);
    CHECK_EQ(lost_count, 0);
    acknowledge(4);
    detect(500);
    CHECK_EQ(lost_count, 2); /* 0 and 1, not 3 */
    CHECK(cl_sent_find(&sent, 1) == NULL);
    CHECK(cl_sent_find(&sent, 3) != NULL);
}

TEST(test_time_threshold)
{
    start(10);
    acknowledge(1);
    detect(500);
    CHECK_EQ(loss.deadline_us, 0 + 800 + 100 + 1);
    detect(900);
    CHECK_EQ(lost_count, 0);
    detect(901);
    CHECK_EQ(lost_count, 1);
    CHECK_EQ(loss.deadline_us, UINT64_MAX); /* later packets were not overtaken */
}

/* Switches let it pass. */
TEST(test_what_is_urgent_overtakes)
{
    start(2);
    for (uint32_t i = 0; i < 2; i++)
        cl_sent_find(&sent, i)->class = 3;
    for (uint32_t i = 0; i < 10; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = 1000, .sent_us = 20, .class = 1};
        cl_sent_push(&sent, &packet);
    }
    acknowledge(11);
    detect(500);
    CHECK_EQ(lost_count, 7); /* of its own class, all but two */
    CHECK_EQ(loss.deadline_us, 20 + 900 + 1);
    detect(40000);
    CHECK_EQ(lost_count, 9);
    detect(50901);
    CHECK_EQ(lost_count, 10); /* the wait has a limit */
    acknowledge(1);
    detect(50902);
    CHECK_EQ(sent.packets, 0);
}

TEST(test_late_acknowledgement_adapts)
{
    start(30);
    acknowledge(20);
    detect(500);
    CHECK_EQ(lost_count, 18);
    struct cl_ack_frame frame = {.largest = 20, .came_count = 1, .came = {{12, 13}}};
    uint32_t shift = loss.time_shift;
    cl_loss_on_frame(&loss, &frame, on_late, NULL);
    CHECK_EQ(late_count, 1);
    CHECK_EQ(loss.packet_threshold, 9); /* 12 would not have been lost */
    CHECK_EQ(loss.time_shift, shift - 1);
    cl_loss_on_frame(&loss, &frame, on_late, NULL);
    CHECK_EQ(late_count, 1); /* once only */
    frame.refused_count = 1;
    frame.refused[0] = frame.came[0] = (struct cl_range){13, 14};
    cl_loss_on_frame(&loss, &frame, on_late, NULL);
    CHECK_EQ(late_count, 1); /* refused is not acknowledged */
}

/* A window of `count` packets, of which the first is lost; `late`: it was only late. */
static void window(uint32_t count, bool late)
{
    uint64_t first = sent.next;
    for (uint32_t i = 0; i < count; i++) {
        struct cl_sent_packet packet = {.kind = CL_PACKET_DATA, .bytes = 1000, .sent_us = 1000000 * first};
        cl_sent_push(&sent, &packet);
    }
    for (uint64_t number = first + 1; number < sent.next; number++)
        acknowledge(number);
    detect(1000000 * first + 10);
    struct cl_ack_frame frame = {.largest = sent.next - 1, .came_count = late, .came = {{first, first + 1}}};
    cl_loss_on_frame(&loss, &frame, on_late, NULL);
}

/* Packets that a long queue held back are acknowledged at last, although as many others are lost or late, too. */
TEST(test_many_late_acknowledgements_are_noticed)
{
    enum { LATE = 40 };
    start(100);
    acknowledge(99);
    detect(100000);
    CHECK_EQ(lost_count, 99);
    struct cl_ack_frame frame = {.largest = 99, .came_count = 1, .came = {{99 - LATE, 100}}};
    cl_loss_on_frame(&loss, &frame, on_late, NULL);
    CHECK_EQ(late_count, LATE);
}

/* A network that reordered for a while, and then only loses. */
TEST(test_thresholds_shrink_again)
{
    start(0);
    for (uint32_t i = 1; i < 10; i++)
        window(20 * i, true);
    CHECK(loss.packet_threshold > 64);
    CHECK_EQ(loss.time_shift, 0);
    for (uint32_t i = 0; i < 10 * CL_LOSS_PERSIST; i++) {
        if (i == CL_LOSS_PERSIST - 1)
            CHECK(loss.packet_threshold > 64); /* not at once */
        window(200, false);
    }
    CHECK_EQ(loss.packet_threshold, CL_LOSS_PACKET_THRESHOLD);
    CHECK_EQ(loss.time_shift, CL_LOSS_TIME_SHIFT);
}

/* Losses of one round trip count once, and reordering that goes on keeps the thresholds. */
TEST(test_thresholds_stay_while_the_network_reorders)
{
    start(0);
    window(100, true);
    uint32_t threshold = loss.packet_threshold;
    CHECK(threshold > 64);
    for (uint32_t i = 0; i < 4 * CL_LOSS_PERSIST; i++)
        window(200, i % CL_LOSS_PERSIST == 0);
    CHECK(loss.packet_threshold >= threshold);
    start(1000);
    loss.packet_threshold = 100;
    for (uint32_t number = 200; number < 1000; number++) { /* one window, whose losses show one by one */
        acknowledge(number);
        detect(10000 - 1);
    }
    CHECK_EQ(loss.packet_threshold, 100);
}

TEST(test_pto)
{
    start(0);
    CHECK_EQ(cl_loss_pto_us(&loss, &sent, &rtt), UINT64_MAX);
    struct cl_sent_packet ping = {.kind = CL_PACKET_PING, .sent_us = 1000};
    cl_sent_push(&sent, &ping);
    CHECK_EQ(cl_loss_pto_us(&loss, &sent, &rtt), UINT64_MAX); /* no timer for PINGs */
    struct cl_sent_packet data = {.kind = CL_PACKET_DATA, .sent_us = 5000};
    cl_sent_push(&sent, &data);
    uint64_t first_us = cl_loss_pto_us(&loss, &sent, &rtt) - 5000, before_us = first_us;
    CHECK(first_us >= CL_LOSS_PTO_MIN_US && first_us < 5000);
    uint64_t elapsed_us = first_us;
    for (loss.pto_count = 1; loss.pto_count < 20; loss.pto_count++) {
        uint64_t wait_us = cl_loss_pto_us(&loss, &sent, &rtt) - 5000;
        CHECK(wait_us >= before_us && wait_us <= CL_LOSS_PTO_MAX_US);
        CHECK(loss.pto_count < 4 || 10 * wait_us < 7 * elapsed_us); /* soon after the network is back */
        before_us = wait_us;
        elapsed_us += wait_us;
    }
    CHECK_EQ(before_us, CL_LOSS_PTO_MAX_US);
    rtt.smoothed_us = 300000; /* a slow link: the cap must not make every packet spurious */
    CHECK(cl_loss_pto_us(&loss, &sent, &rtt) > 5000 + 300000);
}

TEST(test_give_up)
{
    start(5);
    acknowledge(2);
    cl_loss_give_up(&loss, &sent, on_lost, NULL);
    CHECK_EQ(lost_count, 4);
    CHECK_EQ(sent.packets, 0);
}
