#include "congestion/ingress.h"

#include "tests/check.h"

enum { BYTES = 1500, SENDERS = 3 };

static struct cl_ingress ingress;
static struct cl_active_set_member senders[SENDERS];

/* `packets` of the first `count` senders in turn, one each gap_us. Returns when the last one came. */
static uint64_t receive(uint32_t count, uint32_t packets, uint64_t gap_us, uint64_t now_us)
{
    for (uint32_t i = 0; i < packets; i++)
        cl_ingress_on_packet(&ingress, &senders[i % count], BYTES, now_us += gap_us);
    return now_us;
}

static void start(void)
{
    ingress = (struct cl_ingress){0};
    for (int i = 0; i < SENDERS; i++)
        senders[i] = (struct cl_active_set_member){0};
}

static uint32_t count(uint64_t now_us)
{
    return cl_active_set_count(&ingress.senders, CL_INGRESS_IDLE_US, now_us);
}

TEST(test_rate_and_senders)
{
    start();
    CHECK_EQ(cl_ingress_rate(&ingress), 0);
    uint64_t now_us = receive(3, 200, 60, 1000);
    CHECK_EQ(cl_ingress_rate(&ingress), 25000); /* 1500 bytes in 60 us */
    CHECK_EQ(count(now_us), 3);
    now_us = receive(1, 1000, 60, now_us);
    CHECK_EQ(count(now_us), 1);
}

/* Idle times, within and between epochs, are not the port's fault. */
TEST(test_pauses_do_not_lower_it)
{
    start();
    uint64_t now_us = 1000;
    for (int i = 0; i < 20; i++)
        now_us = receive(2, 150, 60, now_us) + 20000;
    CHECK_EQ(cl_ingress_rate(&ingress), 25000);
    now_us = receive(2, 150, 60, now_us + 10000000);
    CHECK_EQ(cl_ingress_rate(&ingress), 25000);
}

TEST(test_follows_a_slower_port)
{
    start();
    uint64_t now_us = receive(3, 1000, 60, 1000);
    receive(3, 4000, 120, now_us);
    CHECK_EQ(cl_ingress_rate(&ingress), 12500);
}

TEST(test_times_that_run_backwards)
{
    start();
    uint64_t now_us = receive(2, 100, 60, 1000);
    cl_ingress_on_packet(&ingress, &senders[0], BYTES, 5); /* from another socket */
    receive(2, 100, 60, now_us);
    CHECK(cl_ingress_rate(&ingress) <= 25400);
}
