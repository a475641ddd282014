#include "sim/rank.h"

#include <string.h>

#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "sim/memory.h"
#include "sim/scarcity.h"
#include "sim/world.h"

enum {
    RECEIVE_PACKETS = 512,         /* most received in one turn */
    DATAGRAM_OVERHEAD_BYTES = 512, /* charged to the socket's buffer per datagram, beside its bytes */
};

/* ---- the clock: every rank has its own, with another start and another speed ---- */

static struct sim_rank *rank_of(const struct sim_driver *driver)
{
    return (struct sim_rank *)(uintptr_t)driver; /* the driver is its first member */
}

static uint64_t clock_us(const struct sim_driver *driver, uint64_t at_ns)
{
    const struct sim_rank *rank = rank_of(driver);
    const struct sim_speed *speed = &rank->world->scenario->speeds[rank->id];
    uint64_t passed_ns = at_ns - rank->world->start_ns;
    int64_t drift_ns = (int64_t)(passed_ns / 1000000) * speed->drift_ppm;
    return speed->clock_us + (passed_ns + (uint64_t)drift_ns) / 1000;
}

/* ---- turns ---- */

void sim_rank_wake(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    const struct sim_event *turn = &rank->driver.event;
    if (rank->driver.dead || (turn->slot != 0 && turn->at_ns <= world->clock.now_ns))
        return;
    uint64_t wake_ns = world->scenario->speeds[rank->id].wake_ns;
    sim_driver_wake(&rank->driver, world->clock.now_ns + sim_random_below(&world->random, wake_ns + 1));
}

void sim_rank_receive(struct sim_rank *rank, struct sim_datagram *datagram)
{
    struct sim_world *world = rank->world;
    const struct sim_driver *driver = &rank->driver;
    uint64_t bytes = driver->inbox_bytes + datagram->length + (driver->inbox_count + 1) * DATAGRAM_OVERHEAD_BYTES;
    if (driver->dead) {
        sim_medium_lose(&world->network.medium, datagram, SIM_LOST_DEAD, "rank");
    } else if (bytes > world->scenario->socket_bytes) {
        sim_medium_lose(&world->network.medium, datagram, SIM_LOST_SOCKET, "rank");
    } else {
        sim_driver_deliver(&rank->driver, datagram);
        if (rank->naps_until_ns <= world->clock.now_ns)
            sim_rank_wake(rank);
    }
}

static void note_received(struct sim_driver *driver, const struct sim_datagram *datagram)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    cl_nap_arrived(&rank->nap, clock_us(driver, datagram->arrived_ns));
    world->network.medium.counts.delivered++;
    if (world->ranks[datagram->from].driver.dead)
        world->last_words_ns = sim_world_now_ns(world);
    sim_trace_mark(&world->trace, (uint64_t)rank->id << 32 | datagram->length);
    sim_trace_datagram(&world->trace, "received", "", datagram->from, datagram->to, datagram->bytes, datagram->length);
    if (rank->specimen != NULL) {
        rank->specimen_length = datagram->length;
        memcpy(rank->specimen, datagram->bytes, datagram->length);
    }
}

static bool emit(struct sim_driver *driver, const struct cl_datagram *from)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    uint32_t length = from->head_length + from->payload_length;
    if (sim_random_chance(&world->random, world->scenario->full_chance))
        return false;
    if (from->peer >= world->scenario->world || from->peer == rank->id || from->path >= world->scenario->paths) {
        sim_world_fail(world, "rank %u sends a datagram to peer %u on path %u, which does not exist", rank->id,
                       from->peer, from->path);
        return true;
    }
    uint32_t most = sim_wiring_datagram_bytes(&world->scenario->wiring, rank->id, from->peer);
    if (length > most) {
        sim_world_fail(world, "rank %u sends a datagram of %u bytes to rank %u; %u are allowed", rank->id, length,
                       from->peer, most);
        return true;
    }
    world->checks->path(world, rank, from);
    struct sim_datagram *datagram = sim_pool_take(&world->network.medium.pool);
    datagram->from = rank->id;
    datagram->to = from->peer;
    datagram->path = from->path;
    datagram->priority = from->priority;
    datagram->ecn = from->droppable ? SIM_NOT_ECT : SIM_ECT;
    datagram->length = sim_driver_flatten(datagram->bytes, from);
    sim_trace_datagram(&world->trace, "sent", "", datagram->from, datagram->to, datagram->bytes, datagram->length);
    sim_network_send(&world->network, datagram, rank->host, world->ranks[from->peer].host);
    return true;
}

static void check_batch(struct sim_driver *driver)
{
    struct sim_rank *rank = rank_of(driver);
    const struct cl_queue *queue = &rank->endpoint->queue;
    rank->world->checks->batch(rank->world, rank, rank->queue_classes, queue->packets - rank->queue_packets);
    rank->queue_classes = queue->classes;
    rank->queue_packets = queue->packets;
}

static uint64_t now_us(void *context)
{
    const struct sim_rank *rank = context;
    return sim_driver_now_us(&rank->driver);
}

void sim_rank_take(struct sim_rank *rank)
{
    struct cl_operation *first = rank->handed_over.first;
    rank->handed_over = (struct cl_operation_list){.last = &rank->handed_over.first};
    cl_groups_take_all(first);
}

static void take(void *context)
{
    sim_rank_take(context);
}

static void receive(void *context)
{
    struct sim_rank *rank = context;
    rank->packets = sim_driver_receive(&rank->driver, RECEIVE_PACKETS);
}

/* The rank sees that processes of its host are gone. */
static void see_deaths(void *context)
{
    struct sim_rank *rank = context;
    struct sim_world *world = rank->world;
    for (; rank->deaths < world->death_count; rank->deaths++) {
        const struct sim_rank *dead = &world->ranks[world->deaths[rank->deaths]];
        if (dead->host != rank->host)
            continue;
        cl_endpoint_peer_lost(rank->endpoint, dead->id);
        cl_groups_peer_died(&rank->groups, dead->id);
    }
}

/* What the meters of the host's other ranks tell. */
static void read_meters(struct sim_rank *rank)
{
    const struct sim_world *world = rank->world;
    uint64_t at_us = sim_driver_now_us(&rank->driver);
    for (uint32_t i = 0; i < rank->neighbour_count; i++) {
        const struct sim_rank *other = &world->ranks[rank->neighbours[i]];
        for (uint32_t path = 0; !other->driver.dead && path < world->scenario->paths; path++) {
            struct cl_told told = cl_endpoint_tell(other->endpoint, path);
            cl_endpoint_hear(rank->endpoint, path, i, &told, at_us);
        }
    }
    rank->nap.shared = cl_endpoint_heard(rank->endpoint, at_us);
}

static bool send_packets(void *context)
{
    struct sim_rank *rank = context;
    read_meters(rank);
    uint64_t emitted = rank->driver.emitted;
    rank->queue_classes = rank->endpoint->queue.classes;
    rank->queue_packets = rank->endpoint->queue.packets;
    if (!sim_driver_send(&rank->driver))
        sim_driver_wake(&rank->driver, rank->world->clock.now_ns + SIM_FULL_US * 1000);
    rank->packets += (uint32_t)(rank->driver.emitted - emitted);
    return false;
}

static void note_timer(void *context)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: timer", rank->id);
}

static void note_completion(void *context, const struct cl_completion *completion)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: a message with %u: %s", rank->id, completion->peer,
                  cl_error_text(completion->status));
    if (completion->status == CL_EPEERLOST)
        rank->world->checks->lost(rank->world, rank, completion->peer);
}

static void note_abort(void *context, const struct cl_closed_group *aborted)
{
    const struct sim_rank *rank = context;
    sim_trace_say(&rank->world->trace, "rank %u: hears that group %u failed by %d: %s", rank->id, aborted->group,
                  aborted->culprit == UINT16_MAX ? -1 : aborted->culprit, cl_error_text(aborted->reason));
}

static const struct cl_turn_io TURN_IO = {.now_us = now_us,
                                          .take = take,
                                          .receive = receive,
                                          .report_deaths = see_deaths,
                                          .send = send_packets,
                                          .expired = note_timer,
                                          .completed = note_completion,
                                          .aborted = note_abort};

/* When the rank looks at its packets again; 0: as soon as one comes. */
static uint64_t nap_ns(struct sim_rank *rank, uint64_t deadline_us, uint64_t at_us)
{
    if (deadline_us <= at_us || cl_endpoint_full_ports(rank->endpoint) != 0)
        return 0;
    uint64_t us = cl_nap_us(&rank->nap, cl_endpoint_lacking(rank->endpoint),
                            cl_endpoint_has_urgent(rank->endpoint, at_us), at_us);
    return us == 0 ? 0 : sim_driver_ns_at(&rank->driver, us < deadline_us - at_us ? at_us + us : deadline_us);
}

static void turn(struct sim_driver *driver)
{
    struct sim_rank *rank = rank_of(driver);
    struct sim_world *world = rank->world;
    const struct sim_speed *speed = &world->scenario->speeds[rank->id];
    uint64_t at_us = sim_driver_now_us(driver), now_ns = world->clock.now_ns;
    struct cl_turn of_rank = {&TURN_IO, rank, rank->endpoint, &rank->groups, &rank->news};
    world->counts.turns++;
    sim_scarcity_set(&world->scarcity, rank->scarce);
    uint64_t deadline_us = cl_turn_take(&of_rank);
    sim_scarcity_set(NULL, 0);
    rank->busy = deadline_us == 0;
    rank->due.fire(&rank->due);
    sim_driver_sleep(driver, now_ns + speed->turn_ns + rank->packets * speed->packet_ns);
    rank->spins = rank->packets == 0 && !rank->busy && deadline_us <= at_us ? rank->spins + 1 : 0;
    rank->naps_until_ns = nap_ns(rank, deadline_us, at_us);
    if (rank->naps_until_ns > 0)
        sim_driver_wake(driver, rank->naps_until_ns);
    else if (rank->busy || driver->inbox != NULL)
        sim_driver_wake(driver, now_ns);
    else if (deadline_us != UINT64_MAX)
        sim_driver_wake(driver, sim_driver_ns_at(driver, deadline_us > at_us ? deadline_us : at_us + 1));
    world->checks->turn(world, rank);
}

static const struct sim_driver_type DRIVER = {
    .turn = turn, .emit = emit, .received = note_received, .filled = check_batch, .clock_us = clock_us};

/* ---- faults ---- */

void sim_rank_pause(struct sim_rank *rank, uint64_t until_ns)
{
    if (rank->driver.dead || until_ns <= rank->paused_until_ns)
        return;
    rank->paused_until_ns = until_ns;
    sim_driver_sleep(&rank->driver, until_ns);
    sim_clock_schedule(&rank->world->clock, &rank->due, until_ns);
}

void sim_rank_kill(struct sim_rank *rank)
{
    struct sim_world *world = rank->world;
    if (rank->driver.dead)
        return;
    sim_driver_kill(&rank->driver);
    sim_clock_cancel(&world->clock, &rank->due);
    for (uint32_t call = 0; call < world->scenario->call_count; call++)
        world->unfinished -= rank->operations[call].trails ||
                             (rank->operations[call].awaited && rank->operations[call].state != SIM_ENDED);
    world->deaths[world->death_count++] = rank->id;
    for (uint32_t i = 0; i < world->scenario->world; i++) /* the other ranks of the host see it at once */
        if (i != rank->id && world->ranks[i].host == rank->host)
            sim_rank_wake(&world->ranks[i]);
}

/* ---- beginning and end ---- */

/* Peers: all other ranks; in large worlds only those that some plan sends to or receives from. */
static void add_peers(struct sim_rank *rank)
{
    enum { LARGE = 64 };
    struct sim_world *world = rank->world;
    const struct sim_scenario *scenario = world->scenario;
    bool *wanted = sim_new(scenario->world, sizeof *wanted);
    for (uint32_t i = 0; i < scenario->world; i++)
        wanted[i] = scenario->world <= LARGE;
    for (uint32_t call = 0; scenario->world > LARGE && call < scenario->call_count; call++) {
        const struct sim_shape *shape = &world->plans->shapes[scenario->calls[call].shape];
        const struct sim_part *part = sim_plans_part(world->plans, shape, rank->id);
        const struct cl_step *steps = sim_plans_steps(world->plans, part);
        for (uint32_t i = 0; i < part->step_count; i++)
            if (steps[i].kind <= CL_RECV_REDUCE)
                wanted[steps[i].peer] = true;
    }
    for (uint16_t i = 0; i < scenario->world; i++)
        if (i != rank->id && scenario->host_of[i] == rank->host)
            rank->neighbours[rank->neighbour_count++] = i;
    for (uint16_t i = 0; i < scenario->world; i++)
        if (wanted[i] && i != rank->id &&
            (cl_endpoint_add_peer(rank->endpoint, i, (uint16_t)scenario->paths, NULL) != CL_OK ||
             !sim_wiring_set_up(&scenario->wiring, scenario->seed, rank->endpoint, rank->id, i)))
            sim_world_fail(world, "rank %u cannot add its peer %u", rank->id, i);
    free(wanted);
}

void sim_rank_init(struct sim_rank *rank, struct sim_world *world, uint16_t id)
{
    const struct sim_scenario *scenario = world->scenario;
    *rank = (struct sim_rank){.world = world, .id = id, .host = scenario->host_of[id]};
    rank->handed_over.last = &rank->handed_over.first;
    rank->driver = (struct sim_driver){.type = &DRIVER,
                                       .clock = &world->clock,
                                       .pool = &world->network.medium.pool,
                                       .tick_ns = 1000,
                                       .batch_capacity = scenario->world > SIM_BATCH ? SIM_BATCH / 8 : SIM_BATCH};
    rank->neighbours = sim_new(scenario->world, sizeof *rank->neighbours);
    rank->members = sim_new(scenario->group_count, sizeof *rank->members);
    rank->operations = sim_new(scenario->call_count, sizeof *rank->operations);
    struct cl_endpoint_config config = {.auth = scenario->auth,
                                        .job = sim_mix(scenario->seed),
                                        .self = id,
                                        .epoch = (uint16_t)(scenario->seed % 7),
                                        .datagram_bytes = scenario->wiring.datagram_bytes[id],
                                        .rate_control = scenario->rate_control,
                                        .credit_bytes = scenario->wiring.credit_bytes[id],
                                        .peer_timeout_us = scenario->peer_timeout_us,
                                        .unexpected_limit_bytes = scenario->unexpected_limit_bytes};
    memcpy(config.key, &config.job, sizeof config.job);
    if (sim_driver_open(&rank->driver, &config) != CL_OK) {
        sim_world_fail(world, "rank %u cannot create its endpoint", id);
        return;
    }
    rank->endpoint = rank->driver.endpoint;
    add_peers(rank);
    for (uint32_t i = 0; i < scenario->fault_count && rank->specimen == NULL; i++)
        if (scenario->faults[i].kind == SIM_FAULT_ATTACK && scenario->faults[i].a == id)
            rank->specimen = sim_new(scenario->datagram_bytes, 1);
}

void sim_rank_free(struct sim_rank *rank)
{
    const struct sim_scenario *scenario = rank->world->scenario;
    for (uint32_t call = 0; call < scenario->call_count; call++) {
        struct sim_operation *operation = &rank->operations[call];
        cl_executor_destroy(operation->operation.executor); /* of operations still in flight */
        if (operation->operation.plan != NULL)
            cl_operation_free(&operation->operation);
        if (operation->output != operation->input)
            free(operation->output);
        free(operation->input);
        free(operation->result);
    }
    for (struct cl_group *group = rank->groups.first; group != NULL; group = group->next)
        cl_group_free(group);
    sim_driver_close(&rank->driver);
    free(rank->specimen);
    free(rank->neighbours);
    free(rank->members);
    free(rank->operations);
}
