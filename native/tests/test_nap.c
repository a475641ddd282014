#include "group/nap.h"

#include "tests/check.h"

/* A thread that receives messages one after another, in virtual time. */
struct thread {
    struct cl_nap nap;
    uint64_t now_us;
    uint32_t wakeups;
    uint64_t late_us; /* from the ends of messages until the thread saw them, in total */
};

/* How packets come: every spacing_us on average, in bursts whose packets are within_us apart. A burst is a super-packet
 * of the kernel, or the turn of one of several ranks that share an interface. */
struct load {
    double spacing_us;
    uint32_t burst;
    double within_us;
};

static uint64_t arrival_us(const struct load *load, uint64_t start_us, uint32_t packet)
{
    uint32_t burst = load->burst, left = burst - 1 - packet % burst;
    return start_us + (uint64_t)((packet / burst + 1) * burst * load->spacing_us - left * load->within_us);
}

/* Receives `messages` of `packets` each. Between messages come acknowledgements of this rank's own. */
static void receive(struct thread *thread, uint32_t messages, uint32_t packets, const struct load *load)
{
    enum { ANSWERS = 3 };
    uint32_t answers_us = (uint32_t)(packets * load->spacing_us / ANSWERS);
    for (uint32_t m = 0; m < messages; m++) {
        uint64_t start_us = thread->now_us + 100;
        for (uint32_t came = 0; came < packets;) {
            uint64_t next_us = arrival_us(load, start_us, came);
            uint64_t nap_us = came ? cl_nap_us(&thread->nap, packets - came, false, thread->now_us) : 0;
            if (nap_us > 0)
                thread->now_us += nap_us;
            else if (thread->now_us < next_us)
                thread->now_us = next_us;
            thread->wakeups++;
            uint64_t at_us = 0;
            for (; came < packets; came++) {
                at_us = arrival_us(load, start_us, came);
                if (at_us > thread->now_us)
                    break;
                cl_nap_arrived(&thread->nap, at_us);
            }
            if (came == packets)
                thread->late_us += thread->now_us - at_us;
        }
        CHECK_EQ(cl_nap_us(&thread->nap, 0, false, thread->now_us), 0);
        for (uint32_t i = 0; i < ANSWERS; i++) {
            cl_nap_arrived(&thread->nap, thread->now_us += answers_us);
            CHECK_EQ(cl_nap_us(&thread->nap, UINT64_MAX, false, thread->now_us), 0);
        }
    }
}

/* 64 KB, there and back: the thread sees the end of a message when it is there, and still saves wake-ups. */
TEST(test_messages_and_answers)
{
    enum { MESSAGES = 50, PACKETS = 46 };
    static const struct load CASES[] = {{121.1, 1, 0}, {60.6, 1, 0}, {60.6, 4, 0}, {12.1, 1, 0}, {12.1, 11, 0}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct thread thread = {.now_us = 1000000};
        receive(&thread, MESSAGES, PACKETS, &CASES[i]);
        printf("   every %.0f us, in bursts of %u: %.0f us late, %.1f wake-ups of %u\n", CASES[i].spacing_us,
               CASES[i].burst, (double)thread.late_us / MESSAGES, (double)thread.wakeups / MESSAGES, PACKETS);
        CHECK(thread.late_us <= 20 * MESSAGES);
        CHECK(thread.wakeups < MESSAGES * PACKETS * 4 / 5);
    }
}

TEST(test_bulk_wakes_the_thread_once_a_batch)
{
    enum { PACKETS = 10000 };
    struct thread thread = {.now_us = 1000000};
    receive(&thread, 1, PACKETS, &(struct load){30, 1, 0});
    CHECK(thread.wakeups < PACKETS / 12);
    CHECK(thread.late_us <= 30);
}

/* Two ranks share 200 Mbit/s. While the other one sends, no packet comes for a while. The end of a message may be in
 * the middle of a burst: it is seen a few packets late. */
TEST(test_ranks_that_send_in_turns)
{
    enum { PACKETS = 10000, MESSAGES = 50, SHORT = 46 };
    for (uint32_t burst = 4; burst <= 32; burst *= 2) {
        struct load load = {121.1, burst, 60.6};
        struct thread bulk = {.nap.shared = true, .now_us = 1000000}, thread = bulk;
        receive(&bulk, 1, PACKETS, &load);
        receive(&thread, MESSAGES, SHORT, &load);
        printf("   bursts of %u: %u wake-ups of %u; of %u: %.0f us late\n", burst, bulk.wakeups, PACKETS, SHORT,
               (double)thread.late_us / MESSAGES);
        CHECK(bulk.wakeups < PACKETS / 5);
        CHECK((double)thread.late_us <= 5 * load.within_us * MESSAGES);
    }
}

TEST(test_few_packets_are_waited_for)
{
    struct thread slow = {.now_us = 1000000}, small = slow;
    receive(&slow, 10, 46, &(struct load){242.2, 1, 0}); /* 50 Mbit/s */
    CHECK_EQ(slow.wakeups, 460);
    receive(&small, 100, 3, &(struct load){60, 1, 0});
    CHECK_EQ(small.wakeups, 300);
}

static struct cl_nap steady(uint64_t until_us, uint32_t spacing_us, bool shared)
{
    struct cl_nap nap = {.shared = shared};
    for (uint32_t i = 0; i <= 2 * CL_NAP_BATCH; i++)
        cl_nap_arrived(&nap, until_us - (2 * CL_NAP_BATCH - i) * spacing_us);
    return nap;
}

TEST(test_limits)
{
    enum { NOW_US = 1000000 };
    struct cl_nap nap = steady(NOW_US, 50, false);
    CHECK_EQ(cl_nap_us(&nap, 1000, false, NOW_US), 50 * CL_NAP_BATCH);
    CHECK_EQ(cl_nap_us(&nap, 1000, true, NOW_US), CL_NAP_MOST_URGENT_US);
    CHECK_EQ(cl_nap_us(&nap, 10, false, NOW_US), 400);
    CHECK_EQ(cl_nap_us(&nap, 10, false, NOW_US + 100), 300); /* the packets come then, too */
    CHECK_EQ(cl_nap_us(&nap, 3, false, NOW_US), 0);          /* not worth it */
    CHECK_EQ(cl_nap_us(&nap, 1, false, NOW_US), 0);
    CHECK_EQ(cl_nap_us(&nap, 1000, false, NOW_US + CL_NAP_STEADY_US + 1), 0);
    CHECK_EQ(cl_nap_us(&nap, UINT64_MAX, false, NOW_US), 0); /* nobody is expected to send */
    nap = steady(NOW_US, 110, false);
    CHECK_EQ(cl_nap_us(&nap, 1000, false, NOW_US), CL_NAP_MOST_US);
    for (int shared = 0; shared < 2; shared++) {
        uint32_t most_us = shared ? CL_NAP_SPACING_SHARED_US : CL_NAP_SPACING_US;
        nap = steady(NOW_US, most_us, shared);
        CHECK_EQ(cl_nap_us(&nap, 1000, false, NOW_US), CL_NAP_MOST_US);
        nap = steady(NOW_US, most_us + 1, shared);
        CHECK_EQ(cl_nap_us(&nap, 1000, false, NOW_US), 0);
    }
}
