#include "sim/run.h"

#include <string.h>

#include "sim/caller.h"
#include "sim/check.h"
#include "sim/membership.h"
#include "sim/memory.h"
#include "sim/network.h"

enum { START_NS = 1000000000, QUIET_NS = 1000000000 /* how long the world is watched after all is done */ };

/* ---- faults ---- */

static void set_interface(struct sim_world *world, const struct sim_fault *fault, bool down)
{
    struct sim_network *network = &world->network;
    uint32_t at = fault->a * network->paths + fault->path;
    network->egress[at].down += down ? 1 : -1u;
    network->ingress[at].down += down ? 1 : -1u;
}

static void apply(struct sim_world *world, const struct sim_fault *fault, bool begin)
{
    struct sim_network *network = &world->network;
    uint32_t at = fault->a * network->paths + fault->path;
    bool of_group = fault->kind == SIM_FAULT_ABORT || fault->kind == SIM_FAULT_CLOSE;
    struct sim_member *member = of_group ? &world->ranks[fault->a].members[fault->b] : NULL;
    switch (fault->kind) {
    case SIM_FAULT_PAUSE:
        if (begin)
            sim_rank_pause(&world->ranks[fault->a], world->clock.now_ns + fault->for_ns);
        break;
    case SIM_FAULT_DEATH:
        sim_rank_kill(&world->ranks[fault->a]);
        break;
    case SIM_FAULT_DOWN:
        set_interface(world, fault, begin);
        break;
    case SIM_FAULT_CUT:
        sim_network_cut(network, fault->a, fault->b, fault->path, begin);
        break;
    case SIM_FAULT_STORM:
        network->ingress[at].noise.storm_loss = begin ? fault->amount : 0;
        break;
    case SIM_FAULT_HOLE:
        network->egress[at].mtu = network->ingress[at].mtu = begin ? (uint32_t)fault->amount : 0;
        break;
    case SIM_FAULT_DETOUR:
        world->ranks[fault->a].strays = 0;
        for (uint16_t i = 0; i < world->scenario->world && !world->ranks[fault->a].driver.dead; i++)
            cl_endpoint_pause(world->ranks[fault->a].endpoint, i, fault->path, begin);
        break;
    case SIM_FAULT_CLOG:
        network->egress[at].slowdown = begin ? fault->amount : 1;
        break;
    case SIM_FAULT_ATTACK:
        if (begin && !world->ranks[fault->a].driver.dead)
            for (double i = 0; i < fault->amount; i++)
                sim_check_attack(world, &world->ranks[fault->a]);
        break;
    case SIM_FAULT_ABORT:
        if (!world->ranks[fault->a].driver.dead && member->state == SIM_INSIDE)
            cl_group_fail(&member->group, CL_EABORTED, member->self);
        break;
    case SIM_FAULT_CLOSE:
        sim_membership_close(member);
        break;
    case SIM_FAULT_SCARCE:
        world->ranks[fault->a].scarce = begin ? fault->amount : 0;
        break;
    default:
        break; /* those of calls: see rank.c */
    }
}

static void strike(struct sim_event *event)
{
    struct sim_world_fault *strike = (struct sim_world_fault *)(void *)event; /* the event is its first member */
    struct sim_world *world = strike->world;
    const struct sim_fault *fault = strike->fault;
    bool begin = !strike->begun;
    strike->begun = true;
    sim_trace_say(&world->trace, "fault: %s %s: a %u, b %u, path %u, amount %g", sim_fault_name(fault->kind),
                  begin ? "begins" : "ends", fault->a, fault->b, fault->path, fault->amount);
    apply(world, fault, begin);
    if (begin && fault->for_ns > 0)
        sim_clock_schedule(&world->clock, &strike->event, world->clock.now_ns + fault->for_ns);
}

static bool is_scheduled(enum sim_fault_kind kind)
{
    return kind != SIM_FAULT_LATE && kind != SIM_FAULT_ABSENT && kind != SIM_FAULT_MISMATCH;
}

/* ---- the network ---- */

static void furnish_link(const struct sim_scenario *scenario, struct sim_link *link, uint32_t path, double rate,
                         bool noisy)
{
    double bits_per_ns = scenario->rates_bps[path] * rate / 1e9;
    link->ns_per_byte = 8 / bits_per_ns;
    link->queue.type = scenario->queue;
    link->queue.limit_bytes = (uint64_t)scenario->queue_packets * (scenario->datagram_bytes + 42);
    link->queue.mark_bytes = (uint64_t)(scenario->wiring.mark * (double)link->queue.limit_bytes);
    link->queue.drops = scenario->wiring.drops;
    if (noisy)
        link->noise = scenario->noise;
}

/* Gives the links of a network what the scenario says. */
static void furnish(const struct sim_scenario *scenario, struct sim_network *network)
{
    for (uint32_t host = 0; host < scenario->hosts; host++) {
        for (uint32_t path = 0; path < scenario->paths; path++) {
            uint32_t at = host * scenario->paths + path;
            double rate = scenario->host_rate[host];
            bool noisy = scenario->noisy_host == UINT32_MAX || scenario->noisy_host == host;
            furnish_link(scenario, &network->egress[at], path, rate, false);
            furnish_link(scenario, &network->ingress[at], path, rate, noisy);
            network->egress[at].delay_ns = scenario->delays_ns[path];
            network->egress[at].jitter_ns = scenario->jitter_ns;
        }
    }
    for (uint32_t path = 0; scenario->trunks && path < scenario->paths; path++)
        for (int way = 0; way < 2; way++)
            furnish_link(scenario, &network->trunk[way][path], path, scenario->hosts / 4 + 1, false);
}

/* ---- the run ---- */

static void deliver(void *context, struct sim_datagram *datagram)
{
    struct sim_world *world = context;
    sim_rank_receive(&world->ranks[datagram->to], datagram);
}

static void make_group(struct sim_world *world, uint32_t index)
{
    const struct sim_group *group = &world->scenario->groups[index];
    struct sim_world_group *made = &world->groups[index];
    made->place_of = sim_new(group->size, sizeof *made->place_of);
    made->hosts = sim_new(group->size, sizeof *made->hosts);
    uint32_t *place_of_host = sim_new(world->scenario->hosts, sizeof *place_of_host);
    uint32_t *count = sim_new(world->scenario->hosts, sizeof *count);
    for (uint32_t rank = 0; rank < group->size; rank++) {
        uint32_t host = world->scenario->host_of[group->members[rank]];
        if (count[host] == 0)
            place_of_host[host] = made->host_count++;
        made->place_of[rank] = place_of_host[host];
        count[host]++;
    }
    for (uint32_t host = 0; host < world->scenario->hosts; host++)
        if (count[host] > 0)
            sim_host_init(&made->hosts[place_of_host[host]], count[host], group->staging_bytes, group->classes);
    memset(count, 0, world->scenario->hosts * sizeof *count);
    for (uint32_t rank = 0; rank < group->size; rank++) {
        uint32_t host = world->scenario->host_of[group->members[rank]];
        made->hosts[made->place_of[rank]].local[count[host]++] = rank;
    }
    free(place_of_host);
    free(count);
}

static void begin(struct sim_world *world)
{
    const struct sim_scenario *scenario = world->scenario;
    sim_network_init(&world->network, &world->clock, &world->trace, scenario->seed, scenario->hosts, scenario->paths,
                     scenario->trunks, scenario->datagram_bytes);
    world->network.medium.deliver = deliver;
    world->network.medium.context = world;
    furnish(scenario, &world->network);
    world->groups = sim_new(scenario->group_count, sizeof *world->groups);
    world->work = sim_new(scenario->call_count, sizeof *world->work);
    world->scarcity.random = sim_random_seeded(scenario->seed, 12);
    for (uint32_t group = 0; group < scenario->group_count; group++)
        make_group(world, group);
    world->ranks = sim_new(scenario->world, sizeof *world->ranks);
    for (uint32_t i = 0; i < scenario->world; i++) {
        sim_rank_init(&world->ranks[i], world, (uint16_t)i);
        sim_caller_init(&world->ranks[i]);
    }
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        world->faults[i] =
            (struct sim_world_fault){.event = {.fire = strike}, .world = world, .fault = &scenario->faults[i]};
        if (world->calm)
            continue;
        world->counts.faults[scenario->faults[i].kind]++;
        if (is_scheduled(scenario->faults[i].kind))
            sim_clock_schedule(&world->clock, &world->faults[i].event, world->start_ns + scenario->faults[i].at_ns);
    }
}

/* Names the first operation that should have ended. */
static void fail_unfinished(struct sim_world *world)
{
    const struct sim_scenario *scenario = world->scenario;
    for (uint32_t i = 0; i < scenario->world; i++) {
        const struct sim_rank *rank = &world->ranks[i];
        for (uint32_t call = 0; call < scenario->call_count && !rank->driver.dead; call++) {
            const struct sim_operation *operation = &rank->operations[call];
            if (operation->member == NULL || operation->state == SIM_ENDED)
                continue;
            sim_world_fail(world, "after %.1f s call %u of rank %u %s: %u operations of all ranks are left",
                           (double)sim_world_now_ns(world) / 1e9, call, i,
                           operation->state == SIM_UNCALLED ? "has not been made" : "is still in flight",
                           world->unfinished);
            return;
        }
    }
}

void sim_run(struct sim_world *world, const struct sim_scenario *scenario, struct sim_plans *plans, bool calm,
             FILE *trace)
{
    *world = (struct sim_world){
        .scenario = scenario, .plans = plans, .checks = &sim_checks, .calm = calm, .start_ns = START_NS};
    world->clock.now_ns = START_NS;
    world->random = sim_random_seeded(scenario->seed, 2);
    world->trace = (struct sim_trace){.file = trace, .clock = &world->clock, .origin_ns = START_NS};
    begin(world);
    while (world->failure[0] == 0 && world->unfinished > 0) {
        if (!sim_clock_step(&world->clock) || sim_world_now_ns(world) > scenario->limit_ns)
            fail_unfinished(world);
    }
    uint64_t quiet_ns = world->clock.now_ns + QUIET_NS;
    while (world->failure[0] == 0 && sim_clock_next_ns(&world->clock) < quiet_ns)
        sim_clock_step(&world->clock);
    if (world->failure[0] == 0)
        sim_check_end(world);
    world->counts.failed_allocations = world->scarcity.failed;
    world->counts.any_source = scenario->any_source || scenario->deserted;
    world->counts.many_groups = scenario->group_count >= SIM_GROUPS_MANY;
    world->counts.many_calls = scenario->call_count >= SIM_CALLS_MANY;
}

void sim_run_free(struct sim_world *world)
{
    const struct sim_scenario *scenario = world->scenario;
    for (uint32_t i = 0; i < scenario->world; i++)
        sim_rank_free(&world->ranks[i]);
    for (uint32_t call = 0; call < scenario->call_count; call++) {
        const struct sim_shape *shape = &world->plans->shapes[scenario->calls[call].shape];
        for (uint32_t rank = 0; world->work[call].inputs != NULL && rank < shape->world; rank++)
            free(world->work[call].inputs[rank]);
        free(world->work[call].inputs);
        free(world->work[call].reduced);
        free(world->work[call].replica);
    }
    free(world->work);
    for (uint32_t group = 0; group < scenario->group_count; group++) {
        for (uint32_t i = 0; i < world->groups[group].host_count; i++)
            sim_host_free(&world->groups[group].hosts[i]);
        free(world->groups[group].hosts);
        free(world->groups[group].place_of);
        free(world->groups[group].incarnations);
    }
    free(world->groups);
    free(world->ranks);
    sim_network_free(&world->network);
    sim_clock_free(&world->clock);
}
