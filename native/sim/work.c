#include "sim/work.h"

#include "sim/element.h"
#include "sim/memory.h"
#include "sim/messages.h"

enum {
    GROUPS_FEW = 3,
    SECOND_LIFE_CALLS = 8,
    DESERTED_MOST = 6,
    MANY_BYTES = 4096 /* of a call that is made 20,000 times */
};

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

/* A group without members. */
static struct sim_group *new_group(struct sim_scenario *scenario)
{
    scenario->groups = sim_resize(scenario->groups, scenario->group_count + 1, sizeof *scenario->groups);
    struct sim_group *group = &scenario->groups[scenario->group_count++];
    *group = (struct sim_group){.layout = scenario->layout};
    group->members = sim_new(scenario->world, sizeof *group->members);
    return group;
}

static void add_group(struct draw *draw, bool part)
{
    struct sim_scenario *scenario = draw->scenario;
    struct sim_group *group = new_group(scenario);
    for (uint32_t i = 0; i < scenario->world; i++)
        if (!part || chance(draw, 0.6))
            group->members[group->size++] = (uint16_t)i;
    if (part)
        group->layout = group->size < 2 ? UINT32_MAX : find_layout(draw, group->members, group->size);
    if (group->layout == UINT32_MAX) {
        free(group->members);
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

static void reserve_calls(struct sim_scenario *scenario, uint32_t more)
{
    if (scenario->call_count + more <= scenario->call_capacity)
        return;
    scenario->call_capacity = 2 * (scenario->call_count + more);
    scenario->calls = sim_resize(scenario->calls, scenario->call_capacity, sizeof *scenario->calls);
}

static void draw_call(struct draw *draw, uint32_t of_group, uint64_t at_ns, uint64_t *budget)
{
    struct sim_scenario *scenario = draw->scenario;
    reserve_calls(scenario, 1);
    struct sim_call *call = &scenario->calls[scenario->call_count];
    *call = (struct sim_call){.group = of_group};
    struct sim_group *group = &scenario->groups[of_group];
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
    struct sim_random random = sim_random_seeded(scenario->seed, STREAM_MESSAGES);
    struct draw own = sim_draw_from(draw, STREAM_ANY_SOURCE);
    struct sim_call calls[MESSAGES_MAX];
    /* A receive from any source does not notice the death of one of several senders: it times out. */
    bool times_out = scenario->story != SIM_STORY_ABSENT && scenario->story != SIM_STORY_MISMATCH &&
                     !sim_story_must_succeed(scenario->story);
    bool any_source = !times_out || chance(&own, 0.3);
    struct sim_messages messages = {.calls = calls,
                                    .capacity = MESSAGES_MAX,
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
    for (uint32_t i = 0; i < messages.count && times_out; i++)
        scenario->any_source = scenario->any_source || calls[i].any_source;
    if (scenario->any_source)
        scenario->timeout_us = scenario->peer_timeout_us + LATE_MOST_US + (uint64_t)scale(&own, 1e6, 1e7);
    uint32_t collectives = scenario->call_count;
    reserve_calls(scenario, messages.count);
    scenario->payload_bytes += sim_messages_insert(&messages, &random, scenario->calls, &scenario->call_count);
    /* Messages wait for each other while collectives that are not called yet are refused and sent again. Behind
     * switches with strict priorities, these would starve the messages of a large world; there the receivers have room.
     */
    uint64_t first_packets = 16ull * scenario->world * scenario->datagram_bytes;
    if (scenario->call_count > collectives && scenario->world > SMALL_WORLD &&
        scenario->unexpected_limit_bytes < first_packets)
        scenario->unexpected_limit_bytes = first_packets;
}

/* In many groups beside the first ones, a few calls each. */
static void draw_many_groups(struct draw *draw, uint64_t at_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    uint32_t first = scenario->group_count;
    for (uint32_t tries = 0; scenario->group_count < SIM_GROUPS_MANY && tries < 4 * SIM_GROUPS_MANY; tries++)
        add_group(draw, chance(draw, 0.7));
    uint64_t budget = 10000;
    for (uint32_t i = first; i < scenario->group_count; i++)
        for (uint64_t calls = 1 + below(draw, 3); calls > 0; calls--)
            draw_call(draw, i, at_ns, &budget);
}

/* The same small collective again and again, thousands of them in flight. */
static void draw_many_calls(struct draw *draw, uint64_t at_ns)
{
    struct sim_scenario *scenario = draw->scenario;
    uint32_t first = scenario->call_count;
    for (uint32_t tries = 0; scenario->call_count == first && tries < 100; tries++) {
        uint64_t budget = 3ull * scenario->world;
        draw_call(draw, (uint32_t)below(draw, scenario->group_count), at_ns, &budget);
        /* Within a host no packet counts, however much memory a call takes. */
        const struct sim_shape *shape = &draw->plans->shapes[scenario->calls[first].shape];
        if (scenario->call_count > first && shape->input_bytes + shape->output_bytes > MANY_BYTES)
            scenario->call_count = first;
    }
    if (scenario->call_count == first)
        return;
    uint64_t gap_ns = chance(draw, 0.5) ? 0 : (uint64_t)scale(draw, 100, 1e5);
    reserve_calls(scenario, SIM_CALLS_MANY);
    for (uint32_t i = 1; i < SIM_CALLS_MANY; i++) {
        struct sim_call *call = &scenario->calls[scenario->call_count++];
        *call = scenario->calls[first];
        call->at_ns += i * gap_ns;
    }
    scenario->depth = (uint32_t)scale(draw, 100, SIM_CALLS_MANY);
}

/* Groups that open and close in mid-run. They have a stream of chance of their own. */
static void draw_lifetimes(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw own = sim_draw_from(draw, STREAM_GROUPS);
    if (scenario->world > LARGE_WORLD || sim_story_is_compared(scenario->story) || !chance(&own, 0.3))
        return;
    /* a rank that is gone, or stuck elsewhere, does not come to the opening */
    bool all_come = scenario->story != SIM_STORY_DEATH && scenario->story != SIM_STORY_ABSENT;
    for (uint32_t i = 0; i < scenario->group_count; i++) {
        scenario->groups[i].opens = chance(&own, 0.6) && all_come;
        scenario->groups[i].closes = chance(&own, 0.6);
    }
}

static void draw_nan(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw own = sim_draw_from(draw, STREAM_NAN);
    if (!chance(&own, 0.15))
        return;
    for (uint32_t i = 0; i < scenario->call_count; i++) {
        struct sim_call *call = &scenario->calls[i];
        bool may = call->kind == SIM_CALL_COLLECTIVE && sim_element_is_float(call->dtype) &&
                   draw->plans->shapes[call->shape].encoded <= SIM_ENCODED_16;
        call->nan = chance(&own, 0.5) && may;
    }
}

/* Notes the calls of each group. */
static void note_calls(struct sim_scenario *scenario)
{
    for (uint32_t i = 0; i < scenario->group_count; i++)
        scenario->groups[i].first = UINT32_MAX;
    for (uint32_t i = 0; i < scenario->call_count; i++) {
        struct sim_group *group = &scenario->groups[scenario->calls[i].group];
        group->first = group->first == UINT32_MAX ? i : group->first;
        group->last = i;
    }
}

void sim_work_draw(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw many = sim_draw_from(draw, STREAM_MANY);
    bool large = scenario->world > LARGE_WORLD;
    add_group(draw, false);
    for (int i = 1; i < GROUPS_FEW && !large; i++)
        if (chance(draw, 0.2))
            add_group(draw, chance(draw, 0.7));
    uint32_t wanted = large ? 1 + (uint32_t)below(draw, 2) : (uint32_t)scale(draw, 1, COLLECTIVES_MAX);
    uint64_t budget = large ? 1 << 20 : (uint64_t)scale(draw, 300, chance(draw, 0.05) ? 30000 : 6000);
    uint64_t at_ns = below(draw, 5 * MS);
    double gap_ns = chance(draw, 0.3) ? 0 : scale(draw, 1e4, 5e7);
    for (uint32_t tries = 0; scenario->call_count < wanted && tries < 2 * COLLECTIVES_MAX; tries++) {
        draw_call(draw, (uint32_t)below(draw, scenario->group_count), at_ns, &budget);
        at_ns += (uint64_t)(2 * gap_ns * sim_random_real(&draw->random));
    }
    scenario->depth = chance(draw, 0.3) ? 1 : 1 + (uint32_t)below(draw, 16);
    scenario->skew_ns = (uint64_t)scale(draw, 1e3, 2e7);
    scenario->timeout_us = 1800000000;
    draw_messages(draw);
    bool small = scenario->world <= SMALL_WORLD && !sim_story_is_compared(scenario->story);
    if (small && chance(&many, 0.01))
        draw_many_groups(&many, at_ns);
    else if (small && scenario->world <= 4 && chance(&many, 0.001))
        draw_many_calls(&many, at_ns);
    draw_nan(draw);
    draw_lifetimes(draw);
    note_calls(scenario);
}

static void draw_second_life(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw own = sim_draw_from(draw, STREAM_SECOND_LIFE);
    if ((scenario->story != SIM_STORY_FROZEN && scenario->story != SIM_STORY_PARTITION) ||
        scenario->world > SMALL_WORLD || !chance(&own, 0.5))
        return;
    double timeout_ns = (double)scenario->peer_timeout_us * 1000;
    uint64_t over_ns = scenario->calls[scenario->call_count - 1].at_ns;
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        struct sim_fault *fault = &scenario->faults[i];
        if (fault->kind == SIM_FAULT_CUT && scenario->story == SIM_STORY_PARTITION && fault->for_ns == 0)
            fault->for_ns = (uint64_t)(scale(&own, 1.3, 3) * timeout_ns);
        uint64_t end_ns = fault->at_ns + (fault->kind == SIM_FAULT_LATE ? 0 : fault->for_ns);
        over_ns = end_ns > over_ns ? end_ns : over_ns;
    }
    over_ns += (uint64_t)(2.5 * timeout_ns) + 3000ull * MS;
    uint32_t group = scenario->group_count;
    add_group(&own, false);
    scenario->groups[group].opens = scenario->groups[group].revives = true;
    uint64_t budget = 3000;
    for (uint64_t calls = 1 + below(&own, SECOND_LIFE_CALLS); calls > 0; calls--)
        draw_call(&own, group, over_ns, &budget);
}

/* Receives from any source, in a group of which nobody but a rank that dies could send. They must not time out. */
static void draw_deserted(struct draw *draw)
{
    struct sim_scenario *scenario = draw->scenario;
    struct draw own = sim_draw_from(draw, STREAM_DESERTED);
    if (scenario->story != SIM_STORY_DEATH || scenario->any_source || scenario->world > LARGE_WORLD ||
        !chance(&own, 0.3))
        return;
    uint16_t dead = UINT16_MAX, other = (uint16_t)below(&own, scenario->world - 1u);
    for (uint32_t i = 0; i < scenario->fault_count; i++)
        if (scenario->faults[i].kind == SIM_FAULT_DEATH)
            dead = (uint16_t)scenario->faults[i].a;
    other = (uint16_t)(other + (other >= dead));
    uint16_t pair[] = {dead < other ? dead : other, dead < other ? other : dead};
    uint32_t layout = find_layout(draw, pair, 2);
    if (dead == UINT16_MAX || layout == UINT32_MAX)
        return;
    struct sim_group *group = new_group(scenario);
    group->layout = layout;
    group->members[group->size++] = pair[0];
    group->members[group->size++] = pair[1];
    uint64_t at_ns = scenario->calls[scenario->call_count - 1].at_ns;
    uint32_t count = 1 + (uint32_t)below(&own, DESERTED_MOST);
    reserve_calls(scenario, count);
    for (uint32_t i = 0; i < count; i++) {
        struct sim_call *call = &scenario->calls[scenario->call_count++];
        *call = (struct sim_call){.kind = SIM_CALL_MESSAGE,
                                  .group = scenario->group_count - 1,
                                  .at_ns = at_ns,
                                  .from = pair[1] == dead,
                                  .to = pair[0] == dead,
                                  .length = (uint32_t)below(&own, 4u * scenario->datagram_bytes),
                                  .any_source = true,
                                  .after = UINT32_MAX};
        scenario->payload_bytes += call->length + 100;
    }
    scenario->deserted = true;
}

void sim_work_draw_again(struct draw *draw)
{
    draw_second_life(draw);
    draw_deserted(draw);
    note_calls(draw->scenario);
}
