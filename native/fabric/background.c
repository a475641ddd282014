#include "fabric/background.h"

#include "sim/memory.h"

enum { SEGMENT_BYTES = 1460 };

/* The share `part` of all flows has at most so many segments; straight lines in between. */
static const struct {
    double segments, part;
} SIZES[] = {{1, 0},     {6, 0.15},  {13, 0.2},   {19, 0.3},   {33, 0.4},    {53, 0.53},
             {133, 0.6}, {667, 0.7}, {1333, 0.8}, {3333, 0.9}, {6667, 0.97}, {20000, 1}};
enum { POINTS = sizeof SIZES / sizeof *SIZES };

uint64_t sim_background_draw(struct sim_random *random)
{
    double part = sim_random_real(random);
    int i = 1;
    while (SIZES[i].part < part)
        i++;
    double along = (part - SIZES[i - 1].part) / (SIZES[i].part - SIZES[i - 1].part);
    return (uint64_t)((SIZES[i - 1].segments + along * (SIZES[i].segments - SIZES[i - 1].segments)) * SEGMENT_BYTES);
}

double sim_background_mean_bytes(void)
{
    double segments = 0;
    for (int i = 1; i < POINTS; i++)
        segments += (SIZES[i].part - SIZES[i - 1].part) * (SIZES[i].segments + SIZES[i - 1].segments) / 2;
    return segments * SEGMENT_BYTES;
}

static void begin_flow(struct sim_event *event)
{
    struct sim_background *background = (struct sim_background *)(void *)event; /* its first member */
    struct sim_random *random = &background->random;
    const struct sim_fabric *fabric = background->dctcp->fabric;
    uint16_t from = (uint16_t)(fabric->hosts + sim_random_below(random, fabric->others));
    uint16_t to = (uint16_t)sim_random_below(random, fabric->hosts);
    struct sim_background_flow *flow = sim_new(1, sizeof *flow);
    *flow = (struct sim_background_flow){.background = background,
                                         .bytes = sim_background_draw(random),
                                         .started_ns = background->clock->now_ns,
                                         .before = background->last};
    background->last = flow;
    double wait_ns = -log(1 - sim_random_real(random)) * background->interval_ns;
    sim_clock_schedule(background->clock, event, background->clock->now_ns + (uint64_t)wait_ns);
    sim_dctcp_flow(background->dctcp, from, to, ++background->count, flow->bytes, flow);
}

static void end_flow(void *context)
{
    struct sim_background_flow *flow = context;
    flow->ended_ns = flow->background->clock->now_ns;
}

void sim_background_init(struct sim_background *background, struct sim_dctcp *dctcp, double load, uint64_t seed,
                         uint64_t start_ns)
{
    const struct sim_fabric *fabric = dctcp->fabric;
    *background = (struct sim_background){.event = {.fire = begin_flow},
                                          .clock = fabric->medium.clock,
                                          .dctcp = dctcp,
                                          .random = sim_random_seeded(seed, 9)};
    dctcp->flow_done = end_flow;
    if (load <= 0 || fabric->others == 0)
        return;
    background->interval_ns = sim_background_mean_bytes() * 8e9 / (load * fabric->config.host_bps * fabric->hosts);
    sim_clock_schedule(background->clock, &background->event, start_ns);
}

void sim_background_free(struct sim_background *background)
{
    sim_clock_cancel(background->clock, &background->event);
    while (background->last != NULL) {
        struct sim_background_flow *flow = background->last;
        background->last = flow->before;
        free(flow);
    }
}
