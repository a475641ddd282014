#include "sim/membership.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "sim/memory.h"
#include "sim/world.h"

enum { LEAVE_NS = 50000000 /* the longest time from the last end to the closing */ };

/* ---- its io: see group/io.h ---- */

static void wake_for_group(void *context)
{
    struct sim_member *member = context;
    if (!member->failed && member->group.status != CL_OK)
        sim_trace_say(&member->rank->world->trace, "rank %u: group %u fails: %s (rank %d of it)", member->rank->id,
                      member->group.id, cl_error_text(member->group.status),
                      member->group.culprit == UINT32_MAX ? -1 : (int)member->group.culprit);
    member->failed = member->group.status != CL_OK;
    cl_groups_call(&member->rank->groups);
    sim_rank_wake(member->rank);
}

static void ring_bell(struct sim_member *member)
{
    sim_rank_wake(member->rank);
}

/* In every third group the kernel does not allow it. */
static int read_memory(void *context, uint32_t index, uint64_t address, void *target, uint64_t bytes)
{
    const struct sim_member *member = context, *from = member->host->members[index];
    if (sim_mix(member->rank->world->scenario->seed + member->group.id) % 3 == 0 || from->rank->driver.dead)
        return CL_ESYSTEM;
    memcpy(target, (const void *)(uintptr_t)address, bytes);
    return CL_OK;
}

/* ---- opening ---- */

static uint32_t index_of(const struct sim_member *member)
{
    return (uint32_t)(member - member->rank->members);
}

static void open_group(struct sim_member *member)
{
    struct sim_rank *rank = member->rank;
    const struct sim_group *group = &rank->world->scenario->groups[index_of(member)];
    struct sim_world_group *made = &rank->world->groups[index_of(member)];
    struct sim_host *host = &made->hosts[made->place_of[member->self]];
    struct cl_group_options options = {.id = index_of(member) + 1,
                                       .rank = member->self,
                                       .size = group->size,
                                       .peers = group->members,
                                       .local = host->local,
                                       .local_count = host->local_count};
    struct cl_group_io io = {
        .wake = wake_for_group, .ended = member->ended, .early = member->early, .read_memory = read_memory};
    sim_member_open(member, rank, host, &options, rank->endpoint, io);
    member->ring = ring_bell;
    cl_groups_add(&rank->groups, &member->group);
}

/* All members of the group, by group rank. */
static struct sim_member *member_of(const struct sim_member *member, uint32_t rank)
{
    const struct sim_world *world = member->rank->world;
    uint32_t index = index_of(member);
    return &world->ranks[world->scenario->groups[index].members[rank]].members[index];
}

static void schedule_soon(struct sim_world *world, struct sim_event *event)
{
    uint64_t skew_ns = world->scenario->skew_ns;
    sim_clock_schedule(&world->clock, event, world->clock.now_ns + sim_random_below(&world->random, skew_ns + 1));
}

/* As commlayer/transport/incarnation.py: the next one, where an end has lost the other in the latest one. */
static uint32_t agreed(struct sim_incarnation ours, struct sim_incarnation theirs)
{
    uint32_t latest = ours.number > theirs.number ? ours.number : theirs.number;
    bool lost = (ours.number == latest && !ours.lives) || (theirs.number == latest && !theirs.lives);
    return latest + lost;
}

/* The rank meets the others: those that it lost, or that lost it, anew. */
static void meet(struct sim_member *member)
{
    struct sim_rank *rank = member->rank;
    const struct sim_group *group = &rank->world->scenario->groups[index_of(member)];
    const struct sim_incarnation *published = rank->world->groups[index_of(member)].incarnations;
    for (uint32_t other = 0; other < group->size; other++) {
        uint32_t incarnation =
            agreed(published[member->self * group->size + other], published[other * group->size + member->self]);
        if (other == member->self || incarnation == 0)
            continue;
        rank->world->counts.revivals++;
        sim_trace_say(&rank->world->trace, "rank %u: meets rank %u again, %u", rank->id, group->members[other],
                      incarnation);
        if (cl_endpoint_revive_peer(rank->endpoint, group->members[other], incarnation) != CL_OK)
            sim_world_fail(rank->world, "rank %u cannot meet rank %u again", rank->id, group->members[other]);
    }
}

/* The second half of opening: no rank calls before all have opened the group. */
static void open_met(struct sim_member *member)
{
    struct sim_world *world = member->rank->world;
    const struct sim_group *group = &world->scenario->groups[index_of(member)];
    meet(member);
    open_group(member);
    sim_trace_say(&world->trace, "rank %u: opens group %u", member->rank->id, member->group.id);
    world->counts.openings++;
    sim_rank_wake(member->rank);
    if (++world->groups[index_of(member)].opened < group->size)
        return;
    for (uint32_t i = 0; i < group->size; i++) {
        struct sim_member *each = member_of(member, i);
        each->state = SIM_INSIDE;
        schedule_soon(world, &each->rank->due);
    }
}

bool sim_membership_enter(struct sim_rank *rank, uint32_t index)
{
    struct sim_world *world = rank->world;
    struct sim_member *member = &rank->members[index];
    const struct sim_group *group = &world->scenario->groups[index];
    struct sim_world_group *made = &world->groups[index];
    if (member->state != SIM_OUTSIDE)
        return false;
    member->state = SIM_COMING;
    if (made->incarnations == NULL)
        made->incarnations = sim_new((size_t)group->size * group->size, sizeof *made->incarnations);
    for (uint32_t i = 0; i < group->size; i++) {
        struct sim_incarnation *own = &made->incarnations[member->self * group->size + i];
        own->lives = cl_endpoint_incarnation(rank->endpoint, group->members[i], &own->number) != CL_EPEERLOST;
    }
    if (++made->come < group->size)
        return false;
    for (uint32_t i = 0; i < group->size; i++)
        schedule_soon(world, &member_of(member, i)->event);
    return false;
}

/* ---- closing ---- */

static void leave(struct sim_member *member)
{
    struct sim_rank *rank = member->rank;
    struct cl_group *group = &member->group;
    int32_t open = CL_OK;
    sim_trace_say(&rank->world->trace, "rank %u: closes group %u", rank->id, group->id);
    rank->world->counts.closings++;
    member->status = atomic_load(&group->status);
    member->state = SIM_LEFT;
    atomic_compare_exchange_strong(&group->status, &open, CL_ECLOSED);
    sim_rank_take(rank);
    cl_group_leave(group, sim_driver_now_us(&rank->driver));
    cl_news_tell(&rank->news);
    sim_member_leave(member);
    cl_groups_remove(&rank->groups, group);
    cl_group_free(group);
    group->io = (struct cl_group_io){0}; /* whoever visits it now crashes */
    sim_rank_wake(rank);                 /* it may have an abort to send to the peers */
    sim_clock_schedule(&rank->world->clock, &rank->due, rank->world->clock.now_ns);
}

void sim_membership_close(struct sim_member *member)
{
    if (member->state == SIM_INSIDE && !member->rank->driver.dead)
        leave(member);
}

void sim_membership_tidy(struct sim_rank *rank, uint32_t index)
{
    const struct sim_group *group = &rank->world->scenario->groups[index];
    struct sim_member *member = &rank->members[index];
    if (!group->closes || member->rank == NULL || member->state != SIM_INSIDE || member->in_flight > 0 ||
        rank->next_call <= group->last)
        return;
    member->state = SIM_LEAVING;
    uint64_t after_ns = sim_random_below(&rank->world->random, 2) * sim_random_below(&rank->world->random, LEAVE_NS);
    sim_clock_schedule(&rank->world->clock, &member->event, rank->world->clock.now_ns + after_ns);
}

/* ---- beginning ---- */

static void go_on(struct sim_event *event)
{
    struct sim_member *member = (void *)((char *)event - offsetof(struct sim_member, event));
    struct sim_rank *rank = member->rank;
    if (rank->driver.dead)
        return;
    if (rank->world->clock.now_ns < rank->paused_until_ns)
        sim_clock_schedule(&rank->world->clock, event, rank->paused_until_ns);
    else if (member->state == SIM_LEAVING)
        leave(member);
    else
        open_met(member);
}

void sim_membership_init(struct sim_rank *rank, void (*ended)(void *member, struct cl_operation *operation, int status),
                         bool (*early)(void *member, struct cl_operation *operation))
{
    const struct sim_scenario *scenario = rank->world->scenario;
    for (uint32_t index = scenario->group_count; index-- > 0;) {
        const struct sim_group *group = &scenario->groups[index];
        struct sim_member *member = &rank->members[index];
        for (uint32_t i = 0; i < group->size; i++)
            if (group->members[i] == rank->id)
                *member = (struct sim_member){
                    .rank = rank, .self = i, .event = {.fire = go_on}, .ended = ended, .early = early};
        if (member->rank == NULL || group->opens)
            continue;
        open_group(member);
        member->state = SIM_INSIDE;
    }
}
