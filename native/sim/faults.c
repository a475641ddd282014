#include "sim/faults.h"

#include <math.h>

#include "protocol/mtu.h"

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
    struct draw own = sim_draw_from(draw, STREAM_PATHS);
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
        scenario->timeout_us = (uint64_t)scale(draw, 1e6, 1e7) + LATE_MOST_US;
        break;
    case SIM_STORY_SCARCE:
        scenario->timeout_us = (uint64_t)scale(draw, 1e6, 1e7) + LATE_MOST_US;
        fault = add_fault(draw, SIM_FAULT_SCARCE, span_ns);
        fault->at_ns = chance(draw, 0.5) ? 0 : fault->at_ns;
        fault->for_ns = (uint64_t)scale(draw, 1e6, 1e10);
        fault->amount = scale(draw, 0.01, 1);
        break;
    case SIM_STORY_CLOSE:
        scenario->timeout_us = (uint64_t)scale(draw, 1e6, 1e7) + LATE_MOST_US;
        __attribute__((fallthrough));
    case SIM_STORY_ABORT:
        fault = add_fault(draw, scenario->story == SIM_STORY_ABORT ? SIM_FAULT_ABORT : SIM_FAULT_CLOSE, span_ns);
        fault->b = (uint32_t)below(draw, scenario->group_count);
        if (!is_member(&scenario->groups[fault->b], fault->a))
            fault->b = 0;
        break;
    default:
        break;
    }
}

void sim_faults_draw(struct draw *draw, uint64_t span_ns)
{
    draw_plot(draw, span_ns);
    draw_harmless(draw, span_ns);
    draw_paths(draw, span_ns);
}
