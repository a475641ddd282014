#include "protocol/replay.h"

#include "tests/check.h"

TEST(test_each_number_once)
{
    struct cl_replay replay = {0};
    static const uint64_t NUMBERS[] = {0, 1, 2, 7, 5, 3, 100, 64, 63, 65, 128};
    enum { COUNT = sizeof(NUMBERS) / sizeof(NUMBERS[0]) };
    for (int i = 0; i < COUNT; i++)
        CHECK(cl_replay_admit(&replay, NUMBERS[i]));
    for (int i = 0; i < COUNT; i++)
        CHECK(!cl_replay_admit(&replay, NUMBERS[i]));
    CHECK(cl_replay_admit(&replay, 4));
}

TEST(test_window)
{
    struct cl_replay replay = {0};
    uint64_t start = 1000000;
    CHECK(cl_replay_admit(&replay, start));
    CHECK(!cl_replay_admit(&replay, start - CL_REPLAY_WINDOW));
    CHECK(cl_replay_admit(&replay, start - CL_REPLAY_WINDOW + 1));
    CHECK(!cl_replay_admit(&replay, start - CL_REPLAY_WINDOW + 1));
    CHECK(!cl_replay_admit(&replay, 0));
}

/* The filter equals a plain list, over leaps of every kind. */
TEST(test_random_numbers)
{
    enum { SPAN = 60000 };
    static bool seen[SPAN];
    struct cl_replay replay = {0};
    uint64_t random = 88172645463325252u, next = 0;
    for (int i = 0; i < 200000; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        uint64_t around = next > CL_REPLAY_WINDOW + 50 ? next - CL_REPLAY_WINDOW - 50 : 0;
        uint64_t number = around + random % (random % 256 == 0 ? 2 * CL_REPLAY_WINDOW + 4000 : CL_REPLAY_WINDOW + 60);
        if (number >= SPAN)
            continue;
        bool old = next > CL_REPLAY_WINDOW && number < next - CL_REPLAY_WINDOW;
        CHECK_EQ(cl_replay_admit(&replay, number), !old && !seen[number]);
        seen[number] = true;
        next = number + 1 > next ? number + 1 : next;
    }
    CHECK(next > SPAN - 3000);
}

/* One number far ahead proves nothing, a second one shortly after it does. */
TEST(test_near)
{
    struct cl_replay replay = {0};
    uint64_t far = 50000000;
    CHECK(cl_replay_near(&replay, CL_REPLAY_AHEAD_MAX));
    CHECK(!cl_replay_near(&replay, far));
    CHECK(cl_replay_near(&replay, 100));  /* the others go on */
    CHECK(!cl_replay_near(&replay, far)); /* a copy is no second one */
    CHECK(!cl_replay_near(&replay, 3 * far));
    CHECK(!cl_replay_near(&replay, 2 * far)); /* nor is any other */
    CHECK(cl_replay_near(&replay, 2 * far + 3));
    CHECK(cl_replay_admit(&replay, 2 * far + 3));
    CHECK(cl_replay_near(&replay, 2 * far + 4));
}
