#include "protocol/spray.h"

#include <stddef.h>

#include "tests/check.h"

enum { BYTES = 1472, PATHS = 3 };

static struct cl_nic nics[PATHS];
static struct cl_path paths[PATHS];
static uint64_t ready_us, egress_ready_us;

static void start(void)
{
    for (uint16_t i = 0; i < PATHS; i++) {
        cl_congestion_nic_init(&nics[i].congestion, cl_congestion_find(NULL), BYTES);
        cl_path_init(&paths[i], i, &nics[i], BYTES);
    }
}

static struct cl_path *pick(void)
{
    struct cl_spray_packet packet = {.bytes = BYTES};
    return cl_spray_pick(paths, PATHS, &packet, 1000, &ready_us, &egress_ready_us);
}

TEST(test_least_expected_delay)
{
    start();
    paths[0].congestion.delay.cc.queue_us = 900;
    paths[2].congestion.delay.cc.queue_us = 500;
    CHECK(pick() == &paths[1]);
    for (int i = 0; i < 30; i++) /* 30 packets of backlog take longer than 500 us */
        cl_congestion_sent_control(&paths[1].congestion, BYTES);
    CHECK(pick() == &paths[2]);
    paths[2].dead = true;
    CHECK(pick() == &paths[0]);
}

TEST(test_paused)
{
    start();
    struct cl_spray_packet packet = {.bytes = BYTES};
    paths[0].paused = paths[1].paused = true;
    paths[2].congestion.delay.cc.queue_us = 900;
    paths[2].rtt.smoothed_us = 900;
    CHECK(pick() == &paths[2]);
    CHECK(cl_spray_fastest(paths, PATHS) == &paths[2]);
    CHECK(!cl_spray_may(&paths[0], &packet, 1000));
    CHECK(cl_spray_may(&paths[2], &packet, 1000));
    CHECK(cl_spray_through(paths, PATHS, &nics[1], &packet, 1000) == NULL);
    CHECK(cl_spray_through(paths, PATHS, &nics[2], &packet, 1000) == &paths[2]);
    paths[2].congestion.delay.cc.window = 0; /* a full path does not bring paused ones back */
    CHECK(pick() == NULL);
    paths[2].dead = true; /* a dead one does */
    CHECK(pick() == &paths[0]);
    CHECK(cl_spray_fastest(paths, PATHS) != &paths[2]);
    CHECK(cl_spray_through(paths, PATHS, &nics[1], &packet, 1000) == &paths[1]);
    paths[0].paused = false;
    CHECK(cl_spray_through(paths, PATHS, &nics[1], &packet, 1000) == NULL);
}

TEST(test_no_room)
{
    start();
    for (int i = 0; i < PATHS; i++)
        paths[i].congestion.delay.cc.window = 0;
    CHECK(pick() == NULL);
    CHECK_EQ(ready_us, UINT64_MAX);
    CHECK_EQ(egress_ready_us, UINT64_MAX);
    paths[1].congestion.delay.cc.window = 10 * BYTES;
    CHECK(pick() == &paths[1]);
    for (int i = 0; i < 100; i++)
        cl_congestion_sent_control(&paths[1].congestion, BYTES);
    CHECK(pick() == NULL);
    CHECK(egress_ready_us > 1000 && egress_ready_us < 100000);
}

TEST(test_own_pacer)
{
    start();
    for (int i = 0; i < PATHS; i++) {
        cl_pacer_set(&paths[i].congestion.delay.pacer, 1000000, 10 * BYTES, 0);
        for (int j = 0; j < 100; j++)
            cl_pacer_sent(&paths[i].congestion.delay.pacer, BYTES);
    }
    CHECK(pick() == NULL);
    CHECK(ready_us > 1000 && ready_us < 1000000);
}

TEST(test_fastest)
{
    start();
    paths[0].rtt.smoothed_us = 300;
    paths[1].rtt.smoothed_us = 100;
    paths[2].rtt.smoothed_us = 200;
    CHECK(cl_spray_fastest(paths, PATHS) == &paths[1]);
    paths[1].dead = true;
    CHECK(cl_spray_fastest(paths, PATHS) == &paths[2]);
    paths[0].dead = paths[2].dead = true;
    CHECK(cl_spray_fastest(paths, PATHS) != NULL);
}

TEST(test_small_packets_wait_for_a_full_port_beside_a_dead_path)
{
    static const struct cl_outbox_port FULL = {.full = true};
    start();
    paths[1].dead = true;
    paths[0].port = paths[2].port = &FULL;
    CHECK(cl_spray_fastest(paths, PATHS) == NULL);
    paths[0].dead = paths[2].dead = true; /* none lives: any will do */
    CHECK(cl_spray_fastest(paths, PATHS) == &paths[1]);
}
