#include "sim/scenario.h"

#include <string.h>

#include "protocol/mtu.h"
#include "sim/element.h"
#include "sim/memory.h"
#include "sim/messages.h"
#include "sim/queue.h"

enum { MS = 1000000, SMALL_WORLD = 8, LARGE_WORLD = 64 };

static const double SECOND = 1e9;

const char *sim_story_name(enum sim_story story)
{
    static const char *const NAMES[SIM_STORIES] = {"noise",  "path",      "late",   "large",    "death",
                                                   "frozen", "partition", "absent", "mismatch", "abort"};
    return NAMES[story];
}

const char *sim_fault_name(enum sim_fault_kind kind)
{
    static const char *const NAMES[SIM_FAULTS] = {"pause", "death",  "down",     "cut",   "storm", "clog",  "attack",
                                                  "late",  "absent", "mismatch", "abort", "hole",  "detour"};
    return NAMES[kind];
}

/* The state of drawing. */
struct draw {
    struct sim_scenario *scenario;
    const struct sim_plans *plans;
    struct sim_random random;
};

static bool chance(struct draw *draw, double probability)
{
    return sim_random_chance(&draw->random, probability);
}

static uint64_t below(struct draw *draw, uint64_t bound)
{
    return sim_random_below(&draw->random, bound);
}

static double scale(struct draw *draw, double least, double most)
{
    return sim_random_scale(&draw->random, least, most);
}

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

/* ---- work ---- */

/* The layout of some of the ranks; UINT32_MAX when there are no plans for it. */
static uint32_t find_layout(const struct draw *draw, const uint16_t *members, uint32_t size)
{
    const struct sim_scenario *scenario = draw->scenario;
    for (uint32_t i = 0; i < draw->plans->head->layout_count; i++) {
        const struct sim_layout *layout = &draw->plans->layouts[i];
        const uint32_t *host_of = sim_plans_hosts(draw->plans, layout);
        bool same = layout->world == size;
        for (uint32_t a = 0; same && a < size; a++)
            for (uint32_t b = 0; same && b < a; b++)
                same = (host_of[a] == host_of[b]) == (scenario->host_of[members[a]] == scenario->host_of[members[b]]);
        if (same)
            return i;
    }
    return UINT32_MAX;
}

static void add_group(struct draw *draw, bool part)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_group *group = &scenario->groups[scenario->group_count++];
    group->members = sim_new(scenario->world, sizeof *group->members);
    group->layout = scenario->layout;
    for (uint32_t i = 0; i < scenario->world; i++)
        if (!part || chance(draw, 0.6))
            group->members[group->size++] = (uint16_t)i;
    if (part)
        group->layout = group->size < 2 ? UINT32_MAX : find_layout(draw, group->members, group->size);
    if (group->layout == UINT32_MAX) {
        free(group->members);
        *group = (struct sim_group){0};
        scenario->group_count--;
    }
}

static void draw_qos(struct draw *draw, struct sim_call *call, const struct sim_shape *shape)
{
    static const uint64_t DEADLINES_US[] = {0, 0, 1, 1000, 20000};
    call->dtype = sim_element_float(shape->itemsize, below(draw, 2));
    call->op = CL_SUM;
    /* No rescaled sums without average: they are rounded on the way. */
    call->qos = (struct cl_qos){.treatment = shape->average ? CL_RESCALE : (uint8_t)(chance(draw, 0.5) * CL_ZERO),
                                .loss_bound = shape->loss_bound,
                                .deadline_us = DEADLINES_US[below(draw, sizeof DEADLINES_US / sizeof *DEADLINES_US)],
                                .protect_first = chance(draw, 0.3) ? (uint32_t)below(draw, 4) : 0,
                                .protect_last = chance(draw, 0.3) ? (uint32_t)below(draw, 4) : 0};
}

static void draw_call(struct draw *draw, uint64_t at_ns, uint64_t *budget)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_call *call = &scenario->calls[scenario->call_count];
    call->group = (uint32_t)below(draw, scenario->group_count);
    struct sim_group *group = &scenario->groups[call->group];
    const struct sim_layout *layout = &draw->plans->layouts[group->layout];
    call->shape = layout->shape_first + (uint32_t)below(draw, layout->shape_end - layout->shape_first);
    const struct sim_shape *shape = &draw->plans->shapes[call->shape];
    uint64_t messages, bytes = sim_plans_payload(draw->plans, shape, &messages);
    uint64_t packets = messages + bytes / (scenario->datagram_bytes - 40);
    if (packets > *budget && scenario->call_count > 0)
        return;
    *budget -= packets < *budget ? packets : *budget;
    scenario->payload_bytes += bytes + messages * 100;
    for (uint32_t rank = 0; rank < shape->world; rank++) {
        uint64_t staging_bytes = sim_plans_part(draw->plans, shape, rank)->staging_bytes;
        group->staging_bytes = group->staging_bytes < staging_bytes ? staging_bytes : group->staging_bytes;
    }
    call->dtype = sim_element_dtype(shape->itemsize, below(draw, 60));
    call->op = shape->average || chance(draw, 0.5) ? CL_SUM : (enum cl_op)below(draw, 4);
    if (shape->encoded) {
        call->dtype = CL_F32;
        call->op = CL_SUM;
    }
    uint8_t priority = (uint8_t)(chance(draw, 0.5) ? 4 : below(draw, 8));
    if (shape->loss_bound > 0)
        draw_qos(draw, call, shape);
    call->qos.priority = priority;
    call->qos.order = (uint16_t)(scenario->call_count % 3); /* no result may depend on it */
    group->classes = (uint8_t)(group->classes | 1u << priority);
    call->at_ns = at_ns;
    scenario->call_count++;
}

/* Puts point-to-point patterns between the collectives. They have a stream of chance of their own. */
static void draw_messages(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_random random = sim_random_seeded(scenario->seed, 3);
    struct sim_call calls[SIM_MESSAGES_MAX];
    /* A receive from any source does not notice the death of one of several senders. */
    bool any_source = sim_story_must_succeed(scenario->story) || scenario->story == SIM_STORY_ABSENT ||
                      scenario->story == SIM_STORY_MISMATCH;
    struct sim_messages messages = {.calls = calls,
                                    .capacity = SIM_MESSAGES_MAX,
                                    .bytes_most =
                                        scenario->datagram_bytes * (uint32_t)sim_random_scale(&random, 1, 100),
                                    .any_source = any_source};
    if (scenario->world > LARGE_WORLD || sim_story_is_compared(scenario->story) || !sim_random_chance(&random, 0.4))
        return;
    for (uint64_t patterns = sim_random_between(&random, 1, 4); patterns > 0; patterns--) {
        messages.group = (uint32_t)sim_random_below(&random, scenario->group_count);
        messages.size = scenario->groups[messages.group].size;
        if (messages.size > 1)
            sim_messages_draw(&messages, &random);
    }
    uint32_t collectives = scenario->call_count;
    scenario->payload_bytes += sim_messages_insert(&messages, &random, scenario->calls, &scenario->call_count);
    /* Messages wait for each other while collectives that are not called yet are refused and sent again. Behind
     * switches with strict priorities, these would starve the messages of a large world; there the receivers have room.
     */
    uint64_t first_packets = 16ull * scenario->world * scenario->datagram_bytes;
    if (scenario->call_count > collectives && scenario->world > SMALL_WORLD &&
        scenario->unexpected_limit_bytes < first_packets)
        scenario->unexpected_limit_bytes = first_packets;
}

static void draw_work(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    bool large = scenario->world > LARGE_WORLD;
    add_group(draw, false);
    for (int i = 1; i < SIM_GROUPS_MAX && !large; i++)
        if (chance(draw, 0.2))
            add_group(draw, chance(draw, 0.7));
    uint32_t wanted = large ? 1 + (uint32_t)below(draw, 2) : (uint32_t)scale(draw, 1, SIM_COLLECTIVES_MAX);
    uint64_t budget = large ? 1 << 20 : (uint64_t)scale(draw, 300, chance(draw, 0.05) ? 30000 : 6000);
    uint64_t at_ns = below(draw, 5 * MS);
    double gap_ns = chance(draw, 0.3) ? 0 : scale(draw, 1e4, 5e7);
    for (uint32_t tries = 0; scenario->call_count < wanted && tries < 2 * SIM_COLLECTIVES_MAX; tries++) {
        draw_call(draw, at_ns, &budget);
        at_ns += (uint64_t)(2 * gap_ns * sim_random_real(&draw->random));
    }
    scenario->depth = chance(draw, 0.3) ? 1 : 1 + (uint32_t)below(draw, 16);
    scenario->skew_ns = (uint64_t)scale(draw, 1e3, 2e7);
    scenario->timeout_us = 1800000000;
    draw_messages(draw);
}

/* ---- faults ---- */

static struct sim_fault *add_fault(struct draw *draw, enum sim_fault_kind kind, uint64_t span_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_fault *fault = &scenario->faults[scenario->fault_count];
    scenario->fault_count += scenario->fault_count + 1 < SIM_FAULTS_MAX;
    *fault = (struct sim_fault){.kind = kind, .at_ns = below(draw, span_ns + 1)};
    fault->path = (uint32_t)below(draw, scenario->paths);
    fault->amount = 1;
    bool of_host = kind == SIM_FAULT_DOWN || kind == SIM_FAULT_CUT || kind == SIM_FAULT_STORM ||
                   kind == SIM_FAULT_CLOG || kind == SIM_FAULT_HOLE;
    uint32_t bound = of_host ? scenario->hosts : scenario->world;
    fault->a = (uint32_t)below(draw, bound);
    fault->b = (fault->a + 1 + (uint32_t)below(draw, bound - 1)) % bound;
    return fault;
}

/* Faults that cost only time, in any story. Their silences stay well below the peer timeout. */
static void draw_harmless(struct draw *draw, uint64_t span_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    double timeout_ns = (double)scenario->peer_timeout_us * 1000;
    if (sim_story_is_compared(scenario->story))
        return;
    bool fatal = !sim_story_must_succeed(scenario->story);
    /* a pause alone may nearly reach the timeout; on a bad network probes get lost as well */
    bool bad = scenario->noise.loss > 0.02 || scenario->noise.burst_begin > 0 || scenario->queue_packets < 50;
    bool storms = chance(draw, 0.25);
    double longest_ns = (storms || bad ? 0.6 : 0.95) * timeout_ns;
    for (uint64_t i = chance(draw, 0.3) ? 1 + below(draw, 3) : 0; i > 0 && !fatal; i--)
        add_fault(draw, SIM_FAULT_PAUSE, span_ns)->for_ns = (uint64_t)scale(draw, 1e7, longest_ns);
    for (uint64_t i = chance(draw, 0.3) ? 1 + below(draw, 3) : 0; i > 0; i--) {
        struct sim_fault *late = add_fault(draw, SIM_FAULT_LATE, 0);
        late->b = (uint32_t)below(draw, scenario->call_count);
        late->for_ns = (uint64_t)scale(draw, 1e6, 1e10);
    }
    for (uint64_t i = storms ? 1 + below(draw, 4) : 0; i > 0; i--) {
        struct sim_fault *storm = add_fault(draw, SIM_FAULT_STORM, span_ns);
        storm->amount = 0.3 + 0.7 * sim_random_real(&draw->random);
        storm->for_ns = (uint64_t)scale(draw, 1e6, 0.1 * timeout_ns);
    }
    for (uint64_t i = chance(draw, 0.25) ? 1 + below(draw, 4) : 0; i > 0; i--) {
        struct sim_fault *clog = add_fault(draw, SIM_FAULT_CLOG, span_ns);
        clog->amount = scale(draw, 2, 50);
        clog->for_ns = (uint64_t)scale(draw, 1e6, 1e9);
    }
    for (uint64_t i = chance(draw, 0.3) ? 1 + below(draw, 4) : 0; i > 0; i--)
        add_fault(draw, SIM_FAULT_ATTACK, span_ns)->amount = (double)(1 + below(draw, 8));
    /* path 0 always lives */
    for (uint64_t i = scenario->paths > 1 && chance(draw, 0.4) ? 1 + below(draw, 3) : 0; i > 0; i--) {
        struct sim_fault *fault = add_fault(draw, chance(draw, 0.5) ? SIM_FAULT_DOWN : SIM_FAULT_CUT, span_ns);
        fault->path = 1 + (uint32_t)below(draw, scenario->paths - 1);
        fault->for_ns = chance(draw, 0.5) ? 0 : (uint64_t)scale(draw, 1e6, 3e9);
        if (fault->kind == SIM_FAULT_CUT && scenario->hosts < 2)
            fault->kind = SIM_FAULT_DOWN;
    }
}

/* Faults of single paths that cost only time. They have a stream of chance of their own. */
static void draw_paths(struct draw *draw, uint64_t span_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw own = {scenario, draw->plans, sim_random_seeded(scenario->seed, 5)};
    if (sim_story_is_compared(scenario->story) || scenario->world > LARGE_WORLD)
        return;
    /* what every network carries */
    bool fits = scenario->datagram_bytes > CL_MTU_LEAST;
    for (uint64_t i = fits && chance(&own, 0.15) ? 1 + below(&own, 2) : 0; i > 0; i--) {
        struct sim_fault *hole = add_fault(&own, SIM_FAULT_HOLE, span_ns);
        struct cl_mtu mtu;
        cl_mtu_init(&mtu, scenario->datagram_bytes);
        hole->amount = (double)(uint64_t)scale(&own, mtu.least, scenario->datagram_bytes);
        hole->at_ns = chance(&own, 0.3) ? 0 : hole->at_ns;
        hole->for_ns = chance(&own, 0.5) ? 0 : (uint64_t)scale(&own, 1e7, 1e10);
    }
    for (uint64_t i = scenario->paths > 1 && chance(&own, 0.2) ? 1 + below(&own, 3) : 0; i > 0; i--) {
        struct sim_fault *detour = add_fault(&own, SIM_FAULT_DETOUR, span_ns);
        detour->at_ns = chance(&own, 0.3) ? 0 : detour->at_ns;
        detour->for_ns = chance(&own, 0.5) ? 0 : (uint64_t)scale(&own, 1e6, 3e9);
    }
}

static bool is_member(const struct sim_group *group, uint32_t rank)
{
    for (uint32_t i = 0; i < group->size; i++)
        if (group->members[i] == rank)
            return true;
    return false;
}

/* A rank that takes part in a call, as `a`, and the call, as `b`. */
static void aim_at_call(struct draw *draw, struct sim_fault *fault)
{
    const struct sim_scenario *scenario = draw->scenario;
    fault->b = (uint32_t)below(draw, scenario->call_count);
    const struct sim_call *call = &scenario->calls[fault->b];
    const struct sim_group *group = &scenario->groups[call->group];
    bool message = call->kind == SIM_CALL_MESSAGE;
    fault->a = group->members[message ? below(draw, 2) ? call->from : call->to : below(draw, group->size)];
}

static void draw_mismatch(struct draw *draw, struct sim_fault *fault)
{
    aim_at_call(draw, fault);
    const struct sim_scenario *scenario = draw->scenario;
    const struct sim_call *call = &scenario->calls[fault->b];
    if (call->kind == SIM_CALL_MESSAGE) {
        fault->amount = call->length + 1 + (double)below(draw, 5000);
        return;
    }
    struct sim_group *group = &draw->scenario->groups[call->group];
    const struct sim_layout *layout = &draw->plans->layouts[group->layout];
    uint32_t shape = call->shape;
    for (int tries = 0; tries < 100; tries++) {
        shape = layout->shape_first + (uint32_t)below(draw, layout->shape_end - layout->shape_first);
        const struct sim_shape *other = &draw->plans->shapes[shape], *own = &draw->plans->shapes[call->shape];
        uint32_t self = 0;
        while (group->members[self] != fault->a)
            self++;
        uint64_t staging_bytes = sim_plans_part(draw->plans, other, self)->staging_bytes;
        if (other->itemsize == own->itemsize && other->numel != own->numel && staging_bytes <= group->staging_bytes)
            break;
        shape = call->shape;
    }
    fault->amount = shape;
    /* The fault is often in another class, too. That draw must not change the others. */
    uint64_t other = sim_mix(scenario->seed ^ 0x636c617373);
    fault->path = other % 3 == 0 ? (uint32_t)(other / 3 % SIM_CLASSES) : call->qos.priority;
    group->classes = (uint8_t)(group->classes | 1u << fault->path);
}

/* The fault of the story. */
static void draw_plot(struct draw *draw, uint64_t span_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    double timeout_ns = (double)scenario->peer_timeout_us * 1000;
    struct sim_fault *fault;
    switch (scenario->story) {
    case SIM_STORY_PATH:
        fault = add_fault(draw, SIM_FAULT_DOWN, span_ns);
        fault->for_ns = chance(draw, 0.5) ? 0 : (uint64_t)scale(draw, 1e7, 2e9);
        break;
    case SIM_STORY_LATE:
        fault = add_fault(draw, SIM_FAULT_LATE, 0);
        aim_at_call(draw, fault);
        fault->for_ns = (uint64_t)scale(draw, 1e7, 2e9);
        break;
    case SIM_STORY_DEATH:
        add_fault(draw, SIM_FAULT_DEATH, span_ns);
        break;
    case SIM_STORY_FROZEN:
        add_fault(draw, SIM_FAULT_PAUSE, span_ns)->for_ns = (uint64_t)(scale(draw, 1.3, 4) * timeout_ns);
        break;
    case SIM_STORY_PARTITION:
        fault = add_fault(draw, SIM_FAULT_CUT, span_ns);
        struct sim_fault cut = *fault;
        bool both = chance(draw, 0.5);
        fault->path = 0;
        for (cut.path = 0; cut.path < scenario->paths; cut.path++) {
            if (cut.path > 0)
                scenario->faults[scenario->fault_count++] = cut;
            if (both) {
                scenario->faults[scenario->fault_count] = cut;
                scenario->faults[scenario->fault_count].a = cut.b;
                scenario->faults[scenario->fault_count++].b = cut.a;
            }
        }
        break;
    case SIM_STORY_ABSENT:
        aim_at_call(draw, add_fault(draw, SIM_FAULT_ABSENT, 0));
        scenario->timeout_us = (uint64_t)scale(draw, 1e6, 2e7) + 11000000; /* longer than any late call */
        break;
    case SIM_STORY_MISMATCH:
        draw_mismatch(draw, add_fault(draw, SIM_FAULT_MISMATCH, 0));
        scenario->timeout_us = (uint64_t)scale(draw, 1e6, 1e7) + 31000000;
        break;
    case SIM_STORY_ABORT:
        fault = add_fault(draw, SIM_FAULT_ABORT, span_ns);
        fault->b = (uint32_t)below(draw, scenario->group_count);
        if (!is_member(&scenario->groups[fault->b], fault->a))
            fault->b = 0;
        break;
    default:
        break;
    }
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
    double work_ns = 8 * SECOND * (double)scenario->payload_bytes / slowest_bps + steps * (2 * longest_ns + 2 * MS);
    scenario->limit_ns = scenario->settled_ns + (uint64_t)(late_ns + 20 * work_ns + 30 * SECOND) +
                         1000 * (scenario->timeout_us < 100000000 ? scenario->timeout_us : scenario->peer_timeout_us);
}

void sim_scenario_draw(struct sim_scenario *scenario, const struct sim_plans *plans, uint64_t seed)
{
    *scenario = (struct sim_scenario){.seed = seed};
    struct draw draw = {scenario, plans, sim_random_seeded(seed, 0)};
    scenario->story = draw_story(&draw);
    draw_layout(&draw);
    draw_network(&draw);
    draw_noise(&draw);
    draw_endpoints(&draw);
    draw_work(&draw);
    double transfer_ns = 8 * SECOND * (double)scenario->payload_bytes / scenario->rates_bps[0] / scenario->hosts;
    uint64_t span_ns = scenario->calls[scenario->call_count - 1].at_ns + (uint64_t)transfer_ns + 10 * MS;
    draw_plot(&draw, span_ns);
    draw_harmless(&draw, span_ns);
    draw_paths(&draw, span_ns);
    draw_limits(&draw);
}

void sim_scenario_free(struct sim_scenario *scenario)
{
    free(scenario->host_rate);
    free(scenario->speeds);
    sim_wiring_free(&scenario->wiring);
    for (uint32_t i = 0; i < scenario->group_count; i++)
        free(scenario->groups[i].members);
}
