#include <stddef.h>

#include "sim/clock.h"
#include "sim/random.h"
#include "tests/check.h"

enum { EVENTS = 500 };

struct item {
    struct sim_event event;
    uint32_t number;
};

static uint32_t happened[EVENTS], happened_count;

static void note(struct sim_event *event)
{
    happened[happened_count++] = ((struct item *)(void *)event)->number;
}

TEST(test_order_of_time_then_of_scheduling)
{
    SCOPED(sim_clock_free) struct sim_clock clock = {.now_ns = 100};
    struct sim_random random = sim_random_seeded(1, 0);
    static struct item items[EVENTS];
    happened_count = 0;
    for (uint32_t i = 0; i < EVENTS; i++) {
        items[i] = (struct item){{.fire = note}, i};
        sim_clock_schedule(&clock, &items[i].event, 100 + sim_random_below(&random, 20));
    }
    for (uint32_t i = 0; i < EVENTS; i += 3) /* moves them behind those of the same time */
        sim_clock_schedule(&clock, &items[i].event, 110);
    uint32_t cancelled = 0;
    for (uint32_t i = 1; i < EVENTS; i += 3, cancelled++)
        sim_clock_cancel(&clock, &items[i].event);
    uint64_t before_ns = 0;
    while (sim_clock_step(&clock)) {
        const struct item *now = &items[happened[happened_count - 1]];
        CHECK(clock.now_ns == now->event.at_ns && clock.now_ns >= before_ns);
        CHECK(now->event.slot == 0 && now->number % 3 != 1);
        before_ns = clock.now_ns;
    }
    CHECK_EQ(happened_count, EVENTS - cancelled);
    for (uint32_t i = 1; i < happened_count; i++) {
        const struct item *a = &items[happened[i - 1]], *b = &items[happened[i]];
        bool same = a->event.at_ns == b->event.at_ns && a->number % 3 == b->number % 3;
        CHECK(!same || a->number < b->number);
    }
}

TEST(test_the_past_is_now)
{
    SCOPED(sim_clock_free) struct sim_clock clock = {.now_ns = 100};
    struct item item = {{.fire = note}, 7};
    happened_count = 0;
    CHECK(!sim_clock_step(&clock));
    sim_clock_schedule(&clock, &item.event, 3);
    CHECK(sim_clock_step(&clock));
    CHECK_EQ(clock.now_ns, 100);
    CHECK_EQ(happened_count, 1);
}
