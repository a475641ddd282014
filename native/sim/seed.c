#include "sim/seed.h"

#include <string.h>

#include "sim/draw.h"
#include "sim/faults.h"
#include "sim/memory.h"
#include "sim/queue.h"
#include "sim/work.h"

static const double SECOND = 1e9;

static enum sim_story draw_story(struct draw *draw)
{
    static const struct {
        enum sim_story story;
        uint32_t weight;
    } STORIES[] = {{SIM_STORY_NOISE, 550},   {SIM_STORY_LATE, 50},   {SIM_STORY_PATH, 80},      {SIM_STORY_LARGE, 8},
                   {SIM_STORY_DEATH, 100},   {SIM_STORY_FROZEN, 40}, {SIM_STORY_PARTITION, 40}, {SIM_STORY_ABSENT, 40},
                   {SIM_STORY_MISMATCH, 50}, {SIM_STORY_ABORT, 42}};
    uint64_t at = below(draw, 1000);
    for (size_t i = 0; i < sizeof STORIES / sizeof *STORIES; i++) {
        if (at < STORIES[i].weight)
            return STORIES[i].story;
        at -= STORIES[i].weight;
    }
    return SIM_STORY_NOISE;
}

/* Some stories have rare relatives. */
static enum sim_story draw_relative(struct draw *draw, enum sim_story story)
{
    struct draw own = sim_draw_from(draw, STREAM_RELATIVE);
    if (story == SIM_STORY_NOISE && chance(&own, 0.05))
        return SIM_STORY_SCARCE;
    if (story == SIM_STORY_ABORT && chance(&own, 0.4))
        return SIM_STORY_CLOSE;
    return story;
}

static bool suits(const struct draw *draw, const struct sim_layout *layout, bool middle)
{
    switch (draw->scenario->story) {
    case SIM_STORY_LARGE:
        return layout->world > LARGE_WORLD;
    case SIM_STORY_PATH:
    case SIM_STORY_LATE:
    case SIM_STORY_PARTITION:
        return layout->world <= SMALL_WORLD && layout->hosts > 1;
    default:
        return middle ? layout->world > SMALL_WORLD && layout->world <= LARGE_WORLD : layout->world <= SMALL_WORLD;
    }
}

static void draw_layout(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    bool middle = chance(draw, 0.03);
    uint32_t count = 0;
    for (uint32_t i = 0; i < draw->plans->head->layout_count; i++)
        count += suits(draw, &draw->plans->layouts[i], middle);
    uint64_t left = below(draw, count);
    for (uint32_t i = 0; i < draw->plans->head->layout_count; i++)
        if (suits(draw, &draw->plans->layouts[i], middle) && left-- == 0)
            scenario->layout = i;
    const struct sim_layout *layout = &draw->plans->layouts[scenario->layout];
    scenario->world = layout->world;
    scenario->hosts = layout->hosts;
    scenario->host_of = sim_plans_hosts(draw->plans, layout);
}

/* ---- network and endpoints ---- */

static void draw_noise(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_noise *noise = &scenario->noise;
    bool large = scenario->story == SIM_STORY_LARGE;
    scenario->noisy_host = UINT32_MAX;
    if (sim_story_is_compared(scenario->story))
        return;
    if (chance(draw, 0.5))
        noise->loss = scale(draw, 0.0005, large ? 0.01 : 0.15);
    if (chance(draw, 0.25)) {
        noise->burst_begin = scale(draw, 0.0005, 0.02);
        noise->burst_ns = (uint64_t)scale(draw, 1e5, 5e7);
        noise->burst_loss = 0.3 + 0.7 * sim_random_real(&draw->random);
    }
    if (chance(draw, 0.4)) {
        noise->reorder = scale(draw, 0.001, 0.5);
        noise->reorder_ns = (uint64_t)scale(draw, 2e3, 2e7);
    }
    if (chance(draw, 0.3))
        noise->duplicate = scale(draw, 0.001, 0.3);
    if (chance(draw, 0.3))
        noise->corrupt = scale(draw, 0.001, 0.05);
    if (chance(draw, 0.25))
        scenario->noisy_host = (uint32_t)below(draw, scenario->hosts);
}

static void draw_network(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    bool path = scenario->story == SIM_STORY_PATH, clean = sim_story_is_compared(scenario->story);
    scenario->paths = path ? 2 + (uint32_t)below(draw, 2) : chance(draw, 0.5) ? 1 : 1 + (uint32_t)below(draw, 4);
    if (scenario->story == SIM_STORY_LARGE)
        scenario->paths = 1;
    scenario->trunks = scenario->hosts > 2 && chance(draw, 0.15) && !clean;
    scenario->queue = chance(draw, 0.3) ? &sim_queue_type_priority : &sim_queue_type_droptail;
    scenario->queue_packets = (uint32_t)scale(draw, clean ? 100 : 4, 1000);
    if (scenario->world > LARGE_WORLD) /* every rank may send a packet or two to every other one */
        scenario->queue_packets += 4 * scenario->world;
    /* the probes and acknowledgements of a thousand peers take 5 Mbit/s; a host may have a fifth of the rate */
    double least_bps = scenario->world > LARGE_WORLD ? 1e8 : clean ? 1e8 : 2e7;
    double rate_bps = scale(draw, least_bps, 4e10), delay_ns = scale(draw, 2e3, clean ? 1e6 : 2e7);
    for (uint32_t i = 0; i < scenario->paths; i++) {
        bool alike = clean || chance(draw, 0.5);
        scenario->rates_bps[i] = alike ? rate_bps : rate_bps * scale(draw, 0.2, 1);
        scenario->delays_ns[i] = (uint64_t)(alike ? delay_ns : delay_ns * scale(draw, 0.2, 5));
    }
    scenario->host_rate = sim_new(scenario->hosts, sizeof *scenario->host_rate);
    for (uint32_t i = 0; i < scenario->hosts; i++)
        scenario->host_rate[i] = !clean && chance(draw, 0.1) ? scale(draw, 0.2, 1) : 1;
    if (chance(draw, 0.4) && !clean)
        scenario->jitter_ns = (uint64_t)scale(draw, 1e3, 5e6);
    scenario->socket_bytes = (uint64_t)scale(draw, clean ? 4e6 : 2e5, 8e6);
    if (chance(draw, 0.2) && !clean)
        scenario->full_chance = scale(draw, 0.001, 0.2);
}

/* How long a packet waits behind a full queue of the slowest link. */
static uint64_t longest_queue_us(const struct sim_scenario *scenario)
{
    double least_bps = INFINITY, least_share = 1;
    for (uint32_t i = 0; i < scenario->paths; i++)
        least_bps = fmin(least_bps, scenario->rates_bps[i]);
    for (uint32_t i = 0; i < scenario->hosts; i++)
        least_share = fmin(least_share, scenario->host_rate[i]);
    return (uint64_t)(8e6 * scenario->queue_packets * scenario->datagram_bytes / (least_bps * least_share));
}

static void draw_endpoints(struct draw *draw)
{
    static const uint32_t DATAGRAMS[] = {1472, 1472, 1472, 576, 8972, 200};
    struct sim_scenario *scenario = draw->scenario;
    scenario->datagram_bytes = DATAGRAMS[below(draw, sizeof DATAGRAMS / sizeof *DATAGRAMS)];
    scenario->peer_timeout_us = chance(draw, 0.7) ? 3000000 : (uint64_t)scale(draw, 1e6, 1e7);
    uint64_t full_queue_us = longest_queue_us(scenario); /* a question and its answer may both meet one */
    if (scenario->peer_timeout_us < 2 * full_queue_us)
        scenario->peer_timeout_us = 2 * full_queue_us;
    scenario->unexpected_limit_bytes =
        chance(draw, 0.6) ? 16 << 20 : (uint64_t)scale(draw, 2.0 * scenario->datagram_bytes, 1e6);
    if (scenario->story == SIM_STORY_LATE)
        scenario->unexpected_limit_bytes = (uint64_t)scale(draw, 2.0 * scenario->datagram_bytes, 1e5);
    scenario->auth = sim_mix(scenario->seed) % 4 == 0 ? CL_AUTH_FULL : CL_AUTH_HEADER;
    scenario->noise.corrupt_payload = scenario->auth == CL_AUTH_FULL;
    sim_wiring_draw(&scenario->wiring, scenario->seed, scenario->world, scenario->datagram_bytes,
                    sim_story_is_compared(scenario->story) || scenario->world > LARGE_WORLD);
    bool slow = chance(draw, 0.2) && !sim_story_is_compared(scenario->story);
    scenario->speeds = sim_new(scenario->world, sizeof *scenario->speeds);
    for (uint32_t i = 0; i < scenario->world; i++) {
        struct sim_speed *speed = &scenario->speeds[i];
        double factor = slow && chance(draw, 0.4) ? scale(draw, 2, 30) : 1;
        speed->turn_ns = (uint64_t)(2000 * factor);
        speed->packet_ns = (uint64_t)(300 * factor);
        speed->wake_ns = (uint64_t)(scale(draw, 1e3, 1e6) * factor);
        speed->drift_ppm = (int64_t)below(draw, 201) - 100;
        speed->clock_us = sim_random_next(&draw->random) >> (18 + below(draw, 30));
        if (chance(draw, 0.1)) /* packets carry 32 bits of the clock, which wrap soon */
            speed->clock_us = (speed->clock_us | UINT32_MAX) - below(draw, 2000000);
    }
}

/* How often a packet must be sent on average until all its fragments arrive, where a hole (faults.h) makes fragments.
 */
static double tries_of_fragments(const struct sim_scenario *scenario)
{
    double tries = 1;
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        if (fault->kind != SIM_FAULT_HOLE)
            continue;
        double own = 1, fragments = (double)scenario->datagram_bytes / fault->amount;
        for (double sent = 0; sent < fragments; sent++)
            own /= 1 - scenario->noise.loss;
        tries = own > tries ? own : tries;
    }
    return tries;
}

static void draw_limits(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    double slowest_bps = 1e18, longest_ns = 0, late_ns = 0;
    for (uint32_t i = 0; i < scenario->paths; i++) {
        double one_way_ns = (double)(scenario->delays_ns[i] + scenario->jitter_ns + scenario->noise.reorder_ns);
        slowest_bps = scenario->rates_bps[i] < slowest_bps ? scenario->rates_bps[i] : slowest_bps;
        longest_ns = one_way_ns > longest_ns ? one_way_ns : longest_ns;
    }
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        uint64_t over_ns = fault->at_ns + (fault->kind == SIM_FAULT_LATE ? 0 : fault->for_ns);
        late_ns += fault->kind == SIM_FAULT_LATE ? (double)fault->for_ns : 0;
        scenario->settled_ns = over_ns > scenario->settled_ns ? over_ns : scenario->settled_ns;
    }
    const struct sim_call *last = &scenario->calls[scenario->call_count - 1];
    if (last->at_ns > scenario->settled_ns)
        scenario->settled_ns = last->at_ns;
    double steps = 2.0 * scenario->world * scenario->call_count;
    double work_ns = tries_of_fragments(scenario) *
                     (8 * SECOND * (double)scenario->payload_bytes / slowest_bps + steps * (2 * longest_ns + 2 * MS));
    /* A rank that stays away from a group stays away from all later ones: they may time out one after the other. And a
     * group that opens after others have closed meets a lost rank again, and waits for it again; twice the peer timeout
     * where a rank still hears the others (check.c). */
    bool each = scenario->any_source || scenario->story == SIM_STORY_ABSENT;
    uint64_t lost_us = 2 * (scenario->peer_timeout_us + scenario->peer_timeout_us / 10);
    scenario->limit_ns =
        scenario->settled_ns + (uint64_t)(late_ns + 20 * work_ns + 30 * SECOND) +
        1000 * (scenario->timeout_us < 100000000 ? (each ? scenario->group_count : 1) * scenario->timeout_us
                                                 : scenario->group_count * lost_us);
}

void sim_seed_draw(struct sim_scenario *scenario, const struct sim_plans *plans, uint64_t seed)
{
    *scenario = (struct sim_scenario){.seed = seed};
    struct draw draw = {scenario, plans, sim_random_seeded(seed, STREAM_SCENARIO)};
    scenario->story = draw_relative(&draw, draw_story(&draw));
    draw_layout(&draw);
    draw_network(&draw);
    draw_noise(&draw);
    draw_endpoints(&draw);
    sim_work_draw(&draw);
    double transfer_ns = 8 * SECOND * (double)scenario->payload_bytes / scenario->rates_bps[0] / scenario->hosts;
    uint64_t span_ns = scenario->calls[scenario->call_count - 1].at_ns + (uint64_t)transfer_ns + 10 * MS;
    sim_faults_draw(&draw, span_ns);
    sim_work_draw_again(&draw);
    draw_limits(&draw);
}
