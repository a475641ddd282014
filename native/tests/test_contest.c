#include "congestion/contest.h"

#include "tests/check.h"

enum { BYTES = 1500, ROUND_PACKETS = 100, ROUND_US = 1000, KEPT_US = 500 };

static struct cl_contest contest;
static uint64_t number, now_us;
static uint32_t senders, at_once, host_us, mark_every; /* 0: no switch marks packets */
static uint32_t ranks, kept_us;
static struct cl_loss_trial trial;

static void start(void)
{
    number = 0;
    now_us = 1000000;
    senders = at_once = 1;
    host_us = mark_every = 0;
    ranks = 1;
    kept_us = KEPT_US;
    trial = (struct cl_loss_trial){0};
    cl_contest_init(&contest, BYTES);
}

/* A round trip in which packets are acknowledged one by one. The queue grows by `step_us` with each; the packet
 * `lost` of the round is lost, with others at once; UINT32_MAX: none. Returns the last news. */
static enum cl_contest_news round_trip(uint32_t queue_us, uint32_t step_us, uint32_t lost)
{
    enum cl_contest_news news = CL_CONTEST_NONE;
    for (uint32_t i = 0; i < ROUND_PACKETS; i++, number++, now_us += ROUND_US / ROUND_PACKETS) {
        struct cl_contest_sample sample = {.bytes = BYTES,
                                           .packets = 1,
                                           .marked = mark_every > 0 && number % mark_every == 0,
                                           .largest = number,
                                           .next = number + ROUND_PACKETS,
                                           .senders = senders,
                                           .alone = senders == 1,
                                           .ranks = ranks,
                                           .limited = true,
                                           .trial = &trial,
                                           .timed = true,
                                           .queue_us = queue_us + i * step_us,
                                           .base_us = ROUND_US,
                                           .host_us = host_us,
                                           .kept_us = kept_us,
                                           .kept_alone_us = KEPT_US};
        enum cl_contest_news latest = cl_contest_on_acked(&contest, &sample, now_us);
        news = latest ? latest : news;
        if (i == lost)
            cl_contest_on_lost(&contest, at_once);
    }
    return news;
}

/* So many round trips with this queue. */
static enum cl_contest_news rounds(uint32_t count, uint32_t queue_us)
{
    enum cl_contest_news news = CL_CONTEST_NONE;
    for (uint32_t i = 0; i < count && !news; i++)
        news = round_trip(queue_us, 0, UINT32_MAX);
    return news;
}

TEST(test_a_queue_that_stays_begins_a_contest)
{
    start();
    CHECK_EQ(rounds(100, KEPT_US), CL_CONTEST_NONE); /* it is the queue that is kept */
    for (int i = 0; i < 50; i++) {                   /* it drains every now and then */
        CHECK_EQ(rounds(CL_CONTEST_ROUNDS - 1, 2000), CL_CONTEST_NONE);
        CHECK_EQ(rounds(1, 0), CL_CONTEST_NONE);
    }
    CHECK_EQ(rounds(20, 2000), CL_CONTEST_BEGAN);
    CHECK(contest.active);
    /* what was in flight still is */
    CHECK(cl_contest_window(&contest) > 90 * BYTES && cl_contest_window(&contest) < 110 * BYTES);
}

/* Switches that mark packets tell all flows that a queue is too long, and leave nothing to contest. */
TEST(test_marks_leave_nothing_to_contest)
{
    start();
    mark_every = ROUND_PACKETS; /* once per round trip */
    CHECK_EQ(rounds(500, 2000), CL_CONTEST_NONE);
    mark_every = 0;
    CHECK_EQ(rounds(CL_CONTEST_ROUNDS, 2000), CL_CONTEST_NONE); /* time counts from the last mark */
    CHECK_EQ(rounds(30, 2000), CL_CONTEST_BEGAN);
}

/* The more another flow takes of the link, the longer is the queue that this job keeps on purpose. */
TEST(test_a_queue_that_is_kept_only_beside_another_flow)
{
    start();
    kept_us = 4000;
    CHECK_EQ(rounds(100, KEPT_US), CL_CONTEST_NONE);
    CHECK_EQ(rounds(20, 2000), CL_CONTEST_BEGAN);
}

TEST(test_a_mark_ends_it)
{
    start();
    rounds(20, 2000);
    CHECK_EQ(rounds(30, 2000), CL_CONTEST_NONE);
    mark_every = 2 * ROUND_PACKETS;
    CHECK_EQ(rounds(2, 2000), CL_CONTEST_ENDED);
    CHECK(!contest.active);
    CHECK(cl_contest_window(&contest) > 90 * BYTES); /* the rest of the control goes on from there */
}

/* So many have one window together, and take longer to find their queue. */
static void share_a_window(uint32_t *number_of_them)
{
    start();
    *number_of_them = 4;
    CHECK_EQ(rounds(30, 2000), CL_CONTEST_NONE);
    CHECK_EQ(rounds(60, 2000), CL_CONTEST_BEGAN);
    CHECK((int)contest.cubic.window >= 4 * ROUND_PACKETS);
    uint64_t window = cl_contest_window(&contest);
    *number_of_them = 2;
    round_trip(2000, 0, UINT32_MAX);
    CHECK(cl_contest_window(&contest) > 19 * window / 10);
}

TEST(test_hosts_share_a_window)
{
    share_a_window(&senders);
}

TEST(test_ranks_of_a_host_share_a_window)
{
    share_a_window(&ranks);
}

/* The queue grows by 9 us with each packet of a round, to 0.9 ms: a buffer that is full loses packets at the end of
 * rounds. */
TEST(test_losses_at_the_longest_queue)
{
    start();
    enum cl_contest_news news = CL_CONTEST_NONE;
    for (int i = 0; i < 60 && !news; i++)
        news = round_trip(0, 9, 95);
    CHECK_EQ(news, CL_CONTEST_OVERFLOWED);
    start();
    senders = 3; /* whose own bursts overflow short buffers */
    for (int i = 0; i < 60; i++)
        CHECK_EQ(round_trip(0, 9, 95), CL_CONTEST_NONE);
}

/* A link loses packets anywhere. Chance begins a contest now and then, less often each time, and it is over soon. */
TEST(test_losses_of_a_link)
{
    enum { SEEDS = 20, ROUNDS = 2000 };
    uint32_t contested = 0;
    for (uint32_t seed = 1; seed <= SEEDS; seed++) {
        start();
        uint32_t random = seed;
        for (int i = 0; i < ROUNDS; i++) {
            random = random * 1664525 + 1013904223;
            round_trip(contest.active ? 0 : 200, contest.active ? 1 : 9, (random >> 8) % ROUND_PACKETS);
            contested += contest.active;
        }
    }
    printf("   %.2f %% of the round trips in contests\n", 100.0 * contested / (SEEDS * ROUNDS));
    CHECK(contested > 0);
    CHECK(contested < SEEDS * ROUNDS / 50);
}

/* In a contest, losses at short queues neither cut the window nor let the contest go on. */
TEST(test_losses_by_chance_end_it)
{
    start();
    rounds(20, 2000);
    double window = contest.cubic.window;
    round_trip(1500, 0, 2); /* shorter than usual */
    CHECK(contest.cubic.window >= window);
    enum cl_contest_news news = CL_CONTEST_NONE;
    for (uint32_t i = 0; i < 60 && !news; i++)
        news = round_trip(100, 9, 37 * i % ROUND_PACKETS);
    CHECK_EQ(news, CL_CONTEST_UNDONE);
}

/* The window is cut where the queue is near the longest one of lately, whatever it was when the contest began. */
TEST(test_losses_near_the_longest_queue_cut)
{
    start();
    rounds(20, 1000);
    round_trip(0, 40, UINT32_MAX); /* it grows to 4 ms */
    double window = contest.cubic.window;
    round_trip(1200, 5, 99); /* longer than usual, but far from full */
    CHECK(contest.cubic.window >= window);
    start();
    rounds(20, 1000);
    round_trip(0, 40, UINT32_MAX);
    round_trip(0, 40, 99);
    CHECK(contest.cubic.window < 0.8 * window);
}

/* A link that loses packets as often at short queues as at long ones is no reason to cut. Where the buffer overflows as
 * well, there are about as many cuts as overflows. The queue grows by 20 us with each packet of a round. */
TEST(test_losses_of_the_link_in_a_contest)
{
    enum { ROUNDS = 75, EVERY = 5, PART = 2 * ROUND_PACKETS / 5 };
    for (int overflows = 0; overflows < 2; overflows++) {
        start();
        rounds(20, 1000);
        uint32_t cuts = 0, overflowed = 0;
        for (uint32_t i = 0; i < ROUNDS; i++) {
            bool other = i % EVERY == EVERY - 1;
            uint32_t lost = 37 * i % PART + (i % EVERY % 2 ? 0 : ROUND_PACKETS - PART);
            double window = contest.cubic.window;
            CHECK_EQ(round_trip(0, 20, !other ? lost : overflows ? ROUND_PACKETS - 1 : UINT32_MAX), CL_CONTEST_NONE);
            CHECK_EQ(round_trip(0, 20, UINT32_MAX), CL_CONTEST_NONE); /* losses count once per round trip */
            cuts += contest.cubic.window < 0.8 * window;
            overflowed += other && overflows;
        }
        printf("   %u cuts, %u overflows\n", cuts, overflowed);
        CHECK(cuts >= overflowed / 2 && cuts <= overflowed * 3 / 2 + ROUNDS / 20);
    }
}

/* In a buffer that is much shorter than the queue that is kept a contest stays, although the link loses packets, too.
 */
TEST(test_a_short_buffer_keeps_its_contest)
{
    for (int is_short = 0; is_short < 2; is_short++) {
        start();
        for (int i = 0; i < 60 && !contest.active; i++)
            round_trip(0, is_short ? 2 : 9, 95);
        CHECK(contest.active);
        enum cl_contest_news news = CL_CONTEST_NONE;
        for (uint32_t i = 0; i < 60 && !news; i++)
            news = round_trip(0, is_short ? 2 : 9, 37 * i % ROUND_PACKETS / 3);
        CHECK_EQ(news, is_short ? CL_CONTEST_NONE : CL_CONTEST_UNDONE);
    }
}

/* Nobody else is there if the queue drains when the window goes down. */
TEST(test_a_probe_that_drains_the_queue_ends_it)
{
    start();
    rounds(20, 2000);
    uint64_t window = cl_contest_window(&contest);
    enum cl_contest_news news = CL_CONTEST_NONE;
    uint32_t spent = 0;
    for (; spent < 200 && !news; spent++)
        news = rounds(1, contest.probed_us ? 0 : 2000);
    CHECK_EQ(news, CL_CONTEST_ENDED);
    CHECK(spent > 40 && spent < 60);
    CHECK(cl_contest_window(&contest) < window / 2); /* what the empty network holds */
}

TEST(test_probes_in_vain_become_rare)
{
    start();
    rounds(20, 2000);
    uint32_t probes = 0;
    for (uint32_t i = 0; i < 2000; i++) {
        bool probed = contest.probed_us > 0;
        CHECK_EQ(rounds(1, probed ? 1000 : 2000), CL_CONTEST_NONE);
        probes += !probed && contest.probed_us > 0;
    }
    CHECK(probes >= 4 && probes <= 6);
    CHECK(contest.active);
    CHECK(cl_contest_window(&contest) > ROUND_PACKETS * BYTES);
    now_us += 2000000; /* nothing was sent */
    CHECK_EQ(rounds(1, 2000), CL_CONTEST_ENDED);
}

/* Several ranks of a host probe at the same times, whenever their contests began, or not at all if they pause then. */
TEST(test_ranks_of_a_host_probe_together)
{
    enum { TOGETHER_US = 1 << 22, ROUNDS = 40000 };
    for (uint32_t late = 0; late < 4; late++) {
        start();
        ranks = 2;
        now_us += 700000 * late;
        CHECK_EQ(rounds(100, 2000), CL_CONTEST_BEGAN);
        uint32_t probes = 0;
        for (uint32_t i = 0; i < ROUNDS; i++) {
            bool probed = contest.probed_us > 0;
            if (late % 2 == 1 && i % 1000 == 0)
                now_us += 200000;
            CHECK_EQ(rounds(1, probed ? 1000 : 2000), CL_CONTEST_NONE);
            if (probed || contest.probed_us == 0)
                continue;
            CHECK(now_us % TOGETHER_US < 8 * ROUND_US);
            probes++;
        }
        CHECK(probes >= 4 && probes <= ROUNDS * ROUND_US / TOGETHER_US);
    }
}

/* What probes in vain have shown is forgotten some time after the contest, also where hosts share a port. */
TEST(test_vain_probes_are_forgotten)
{
    for (senders = 1; senders <= 2; senders++) {
        uint32_t shared = senders;
        start();
        senders = shared;
        rounds(100, 2000);
        for (uint32_t i = 0; i < 1000; i++)
            rounds(1, contest.probed_us ? 1000 : 2000);
        CHECK(contest.active);
        now_us += 2000000; /* nothing was sent */
        CHECK_EQ(rounds(1, 0), CL_CONTEST_ENDED);
        now_us += 20000000;
        CHECK_EQ(rounds(5, 0), CL_CONTEST_NONE);
        CHECK_EQ(rounds(100, 2000), CL_CONTEST_BEGAN);
        uint32_t spent = 0;
        for (; spent < 2000 && !contest.probed_us; spent++)
            rounds(1, 2000);
        CHECK(spent > 40 && spent < 60);
    }
}

/* A loss trial is a contest, which leaves no trace if the link loses the packets. */
TEST(test_a_trial)
{
    for (int lossy = 0; lossy < 2; lossy++) {
        start();
        rounds(5, 100);
        round_trip(100, 1, 50);
        trial = (struct cl_loss_trial){
            .least = CL_LOSS_TRIAL_LOSS, .enough = CL_LOSS_TRIAL_PACKETS, .trial = true, .before = 0.04};
        CHECK_EQ(round_trip(100, 1, 99), CL_CONTEST_BEGAN);
        CHECK(contest.active);
        enum cl_contest_news news = CL_CONTEST_NONE;
        at_once = 4;
        for (uint32_t i = 0; i < 4 && !news; i++)
            news = round_trip(100, 1, lossy ? 10 : UINT32_MAX);
        CHECK_EQ(news, lossy ? CL_CONTEST_UNDONE : CL_CONTEST_NONE);
        CHECK_EQ(contest.active, !lossy);
    }
}

/* Other ranks of this host may have caused the losses: only where the buffer is too short to show the queue of TCP is
 * the trial a contest. */
TEST(test_a_trial_beside_other_ranks)
{
    for (uint32_t queue_us = KEPT_US / 2; queue_us <= 4 * KEPT_US; queue_us *= 2) {
        start();
        ranks = 2;
        rounds(5, queue_us);
        round_trip(queue_us, 1, 50);
        trial = (struct cl_loss_trial){
            .least = CL_LOSS_TRIAL_LOSS, .enough = CL_LOSS_TRIAL_PACKETS, .trial = true, .before = 0.04};
        CHECK_EQ(round_trip(queue_us, 0, 99), queue_us < 2 * KEPT_US ? CL_CONTEST_BEGAN : CL_CONTEST_NONE);
    }
}

/* Hosts that sleep have packets in flight that are in no network: the window and the bursts are longer by these. */
TEST(test_hosts_that_sleep)
{
    start();
    rounds(20, 1000);
    uint64_t window = cl_contest_window(&contest), burst = cl_contest_burst(&contest);
    host_us = 2000;
    rounds(5, 1000);
    CHECK(cl_contest_window(&contest) > 19 * window / 10);
    CHECK(cl_contest_burst(&contest) > 10 * burst);
}

TEST(test_a_silent_peer)
{
    start();
    rounds(20, 2000);
    uint64_t window = cl_contest_window(&contest);
    cl_contest_on_pto(&contest, 1);
    CHECK_EQ(cl_contest_window(&contest), window);
    for (uint32_t count = 3; count < 6; count++)
        cl_contest_on_pto(&contest, count);
    CHECK(cl_contest_window(&contest) < window / 2);
}
