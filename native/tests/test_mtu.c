#include "protocol/mtu.h"

#include "tests/check.h"

enum { FULL = 8972 };

static struct cl_mtu mtu;
static uint64_t now_us;

static void start(uint32_t full)
{
    cl_mtu_init(&mtu, full);
    now_us = 1000;
}

/* A packet of `large` bytes is lost, one of `small` bytes that left after it comes. */
static void lose(uint32_t large, uint32_t small)
{
    cl_mtu_on_lost(&mtu, now_us, large);
    cl_mtu_on_came(&mtu, now_us + 10, small);
    now_us += 20;
    cl_mtu_judge(&mtu, now_us);
}

/* Rounds of such losses, and PINGs of `passed` bytes at most arrive: returns how many were sent. */
static int suspect(uint32_t large, uint32_t small, uint32_t passed)
{
    int pings = 0;
    for (int i = 0; i < CL_MTU_ROUNDS; i++)
        lose(large, small);
    while (mtu.suspect && pings <= CL_MTU_TRIES) {
        now_us = mtu.next_us > now_us ? mtu.next_us : now_us;
        uint32_t probe = cl_mtu_probe(&mtu, 1000, now_us);
        if (!mtu.suspect)
            break; /* this PING belongs to the search */
        CHECK_EQ(probe, large);
        pings++;
        if (probe <= passed)
            cl_mtu_on_came(&mtu, now_us, probe);
    }
    return pings;
}

TEST(test_a_black_hole_is_found)
{
    start(FULL);
    for (int i = 0; i < CL_MTU_ROUNDS; i++) {
        CHECK_EQ(mtu.limit, FULL);
        CHECK_EQ(mtu.next_us, UINT64_MAX);
        lose(FULL, 40);
    }
    CHECK_EQ(mtu.limit, FULL); /* PINGs have the last word */
    CHECK(mtu.next_us <= now_us);
    CHECK_EQ(suspect(FULL, 40, FULL - 1), CL_MTU_TRIES);
    CHECK_EQ(mtu.limit, CL_MTU_BASE);
    suspect(CL_MTU_BASE, 40, 0); /* and a deeper one */
    CHECK_EQ(mtu.limit, CL_MTU_BASE / 2);
    suspect(CL_MTU_BASE / 2, 40, 0);
    CHECK_EQ(mtu.limit, mtu.least);
    suspect(mtu.least, 40, 0);
    CHECK_EQ(mtu.limit, mtu.least);
}

/* In a full queue, large packets get lost while small ones come, round after round. A PING that comes shows that they
 * pass: nothing leaves in fragments, which would fill the queue further. */
TEST(test_losses_in_a_full_queue_are_no_black_hole)
{
    start(FULL);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(suspect(FULL, 40, FULL), 1);
        CHECK_EQ(mtu.limit, FULL);
        CHECK_EQ(mtu.next_us, UINT64_MAX);
    }
}

TEST(test_no_black_hole)
{
    start(FULL);
    for (int i = 0; i < 100; i++) { /* random loss: packets of the same size come */
        lose(FULL, 40);
        cl_mtu_on_came(&mtu, now_us++, FULL);
    }
    for (int i = 0; i < 100; i++) { /* everything is lost */
        cl_mtu_on_lost(&mtu, now_us++, FULL);
        cl_mtu_on_lost(&mtu, now_us++, 40);
        cl_mtu_judge(&mtu, now_us);
    }
    for (int i = 0; i < 100; i++) /* the link was down while many left: one round only */
        cl_mtu_on_lost(&mtu, now_us - 50, FULL);
    lose(FULL, 40);
    for (int i = 0; i < 100; i++)
        lose(40, 30); /* small ones get lost too */
    CHECK_EQ(mtu.limit, FULL);
    start(400);
    for (int i = 0; i < 100; i++)
        lose(400, 40);
    CHECK_EQ(mtu.limit, 400);
}

/* Small traffic that is larger than the path's least size does not hide the hole. */
TEST(test_packets_between)
{
    start(FULL);
    for (int i = 0; i < CL_MTU_ROUNDS; i++) {
        lose(FULL, 1400);
        cl_mtu_on_came(&mtu, now_us++, 1400);
    }
    suspect(FULL, 1400, 1400);
    cl_mtu_on_came(&mtu, now_us++, 1400);
    CHECK_EQ(mtu.limit, 1400);
}

/* Answers the PINGs as a path that carries `carried` bytes; returns how many there were until the search ends. */
static uint32_t search(uint32_t carried)
{
    uint32_t count = 0;
    while (mtu.next_us < now_us + CL_MTU_AGAIN_US / 2) {
        now_us = mtu.next_us > now_us ? mtu.next_us : now_us + 1;
        uint32_t probe = cl_mtu_probe(&mtu, 1000, now_us);
        count += probe > 0;
        CHECK(probe <= FULL);
        if (probe && probe <= carried)
            cl_mtu_on_came(&mtu, now_us, probe);
        CHECK(count < 100);
        if (count >= 100)
            break;
    }
    return count;
}

TEST(test_search)
{
    static const uint32_t CARRIED[] = {600, 1200, 1252, 1400, 1472, 4000, 8900, FULL};
    for (uint32_t i = 0; i < sizeof CARRIED / sizeof *CARRIED; i++) {
        start(FULL);
        suspect(FULL, 40, 40);
        uint32_t found =
            CARRIED[i] < CL_MTU_BASE ? CL_MTU_BASE : CARRIED[i]; /* loss shows that even that is too much */
        uint32_t count = search(found);
        CHECK(mtu.limit <= found && found <= mtu.limit + CL_MTU_STEP);
        CHECK(count <= (CARRIED[i] == FULL ? 1 : 35));
        CHECK((mtu.next_us == UINT64_MAX) == (mtu.limit == FULL));

        /* the network is repaired */
        if (mtu.limit == FULL)
            continue;
        now_us = mtu.next_us;
        CHECK_EQ(search(FULL), 1);
        CHECK_EQ(mtu.limit, FULL);
        CHECK_EQ(mtu.next_us, UINT64_MAX);
    }
}

/* Lost PINGs of one size are tried again before the size counts as too large. */
TEST(test_search_with_losses)
{
    start(FULL);
    suspect(FULL, 40, 40);
    for (uint32_t count = 0; mtu.next_us < now_us + CL_MTU_AGAIN_US / 2 && count < 100; count++) {
        now_us = mtu.next_us > now_us ? mtu.next_us : now_us + 1;
        uint32_t probe = cl_mtu_probe(&mtu, 1000, now_us);
        if (probe && probe <= 1472 && count % 2)
            cl_mtu_on_came(&mtu, now_us, probe);
    }
    CHECK(mtu.limit <= 1472 && 1472 <= mtu.limit + CL_MTU_STEP);
}

/* While nothing is sent, nobody looks for anything. */
TEST(test_search_waits_for_traffic)
{
    start(FULL);
    cl_mtu_resume(&mtu, now_us);
    CHECK_EQ(mtu.next_us, UINT64_MAX);
    suspect(FULL, 40, 40);
    cl_mtu_postpone(&mtu, UINT64_MAX);
    cl_mtu_resume(&mtu, 77777);
    CHECK_EQ(mtu.next_us, 77777);
    cl_mtu_resume(&mtu, 88888);
    CHECK_EQ(mtu.next_us, 77777);
}
