#include "congestion/cubic.h"

#include "tests/check.h"

/* Round trips of 20 ms in which the whole window is acknowledged; returns the time. */
static uint64_t run(struct cl_cubic *cubic, uint32_t rounds, uint64_t now_us)
{
    for (uint32_t i = 0; i < rounds; i++) {
        now_us += 20000;
        cl_cubic_grow(cubic, cubic->window, 20000, now_us);
    }
    return now_us;
}

/* After a cut it is back at its former window when RFC 9438 says so, has stayed near it, and leaves it behind. */
TEST(test_returns_to_the_last_window)
{
    struct cl_cubic cubic;
    cl_cubic_init(&cubic, 1000);
    cl_cubic_cut(&cubic);
    CHECK_EQ((int)cubic.window, 700);
    uint64_t now_us = run(&cubic, 455 / 2, 1000000); /* K is the cube root of 300 / 0.4, 9.09 s */
    CHECK(cubic.window > 960 && cubic.window < 1000);
    now_us = run(&cubic, 455 / 2, now_us);
    CHECK(cubic.window > 990 && cubic.window < 1010);
    run(&cubic, 455, now_us);
    CHECK(cubic.window > 1250 && cubic.window < 1400);
}

/* Small windows grow as those of Reno with a cut of 30 %: 9/17 of a packet per round trip, later one. */
TEST(test_small_windows)
{
    struct cl_cubic cubic;
    cl_cubic_init(&cubic, 20);
    cl_cubic_cut(&cubic);
    uint64_t now_us = run(&cubic, 8, 1000000);
    CHECK(cubic.window > 17 && cubic.window < 19);
    now_us = run(&cubic, 8, now_us); /* it has passed the window before the cut */
    double window = cubic.window;
    CHECK(window > 20);
    run(&cubic, 8, now_us);
    CHECK(cubic.window - window > 7.9 && cubic.window - window < 8.1);
}

/* A flow that did not reach its last window leaves room for others. */
TEST(test_converges_fast)
{
    struct cl_cubic cubic;
    cl_cubic_init(&cubic, 100);
    cl_cubic_cut(&cubic);
    cl_cubic_cut(&cubic);
    CHECK(cubic.before > 59 && cubic.before < 60);
    for (int i = 0; i < 20; i++)
        cl_cubic_cut(&cubic);
    CHECK_EQ((int)cubic.window, CL_CUBIC_WINDOW_LEAST);
}
