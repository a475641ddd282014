#include "sim/check.h"

#include <math.h>
#include <string.h>

#include "kernels/reduce.h"
#include "protocol/endpoint.h"
#include "protocol/endpoint_state.h"
#include "protocol/packet.h"
#include "sim/account.h"
#include "sim/data.h"
#include "sim/element.h"
#include "sim/memory.h"

enum {
    SCRIBBLE = 0xDB,       /* callers write it into their buffers after the end */
    LOOK_EVERY = 64,       /* turns between two looks at all peers of a rank */
    CONTROLS_MOST = 256,   /* control packets that wait for one peer, beside two for each call that may be in flight */
    SENT_MOST = 1 << 16,   /* packets of a path that are remembered */
    STRAYS_MOST = 64,      /* per peer: probes, and packets that a full wire held back, on a paused path */
    MARKS_LEAST = 32,      /* marks of which the sender must have heard, if the path lives */
    SPINS_MOST = 100,      /* turns without work */
    SLACK_NS = 1000000000, /* from the peer timeout to the typed error on every rank, over a lossy network */
};

/* ---- collectives ---- */

static bool compare(struct sim_world *world, const struct sim_operation *operation, const uint8_t *expected,
                    const struct sim_clause *clause)
{
    const uint8_t *got = operation->output + clause->target;
    enum cl_dtype dtype = world->scenario->calls[operation->call].dtype;
    uint64_t at = sim_element_difference(dtype, got, expected, clause->length);
    if (at == clause->length)
        return true;
    while (got[at] == expected[at])
        at++;
    sim_world_fail(world, "rank %u has a wrong result of call %u (%s): byte %llu of OUTPUT is %02x, not %02x",
                   operation->member->rank->id, operation->call, world->plans->shapes[operation->shape].collective,
                   (unsigned long long)(clause->target + at), got[at], expected[at]);
    return false;
}

/* A sum of values that travelled in 8 or 4 bits: the errors are those of the codecs (kernels/codec.h), and all ranks
 * have the same bits. */
static bool compare_lossy(struct sim_world *world, const struct sim_operation *operation, const uint8_t *exact,
                          const struct sim_clause *clause)
{
    const double INT8_ERROR = 0.51 / 127 * SIM_SMALL, INT4_ERROR = 0.0125, SLACK = 3, WORST = 0.03;
    struct sim_work *work = &world->work[operation->call];
    const struct sim_shape *shape = &world->plans->shapes[operation->shape];
    uint64_t count = clause->length / sizeof(float);
    double squares = 0, errors = 0, most = 0;
    for (uint64_t i = 0; i < count; i++) {
        float got, expected;
        memcpy(&got, operation->output + clause->target + i * sizeof got, sizeof got);
        memcpy(&expected, exact + i * sizeof expected, sizeof expected);
        double error = fabs((double)got - (double)expected);
        errors += error * error;
        most = isnan(error) || error > most ? error : most;
        squares += (double)expected * expected;
        for (uint32_t rank = 0; rank < shape->world; rank++) {
            double value = (double)sim_data_value(world, operation->call, rank, clause->source / sizeof(float) + i);
            squares += value * value;
        }
    }
    /* of few values, errors do not average out: they may all have one sign */
    double allowed = squares * (count < 1024 ? WORST * shape->world : SLACK * INT4_ERROR);
    bool right = shape->encoded == SIM_ENCODED_8 ? most <= 2 * shape->world * INT8_ERROR : errors <= allowed;
    world->counts.lossy++;
    if (!right)
        sim_world_fail(world, "rank %u has a wrong result of call %u: its errors are up to %g, and %g of %g together",
                       operation->member->rank->id, operation->call, most, sqrt(errors), sqrt(squares));
    if (work->replica == NULL) {
        work->replica = sim_new(shape->output_bytes, 1);
        memcpy(work->replica, operation->output, shape->output_bytes);
    }
    if (memcmp(work->replica, operation->output, shape->output_bytes) != 0)
        sim_world_fail(world, "rank %u has another result of call %u than the ranks before",
                       operation->member->rank->id, operation->call);
    return right;
}

static void check_result(struct sim_world *world, const struct sim_operation *operation)
{
    struct sim_work *work = &world->work[operation->call];
    const struct sim_shape *shape = &world->plans->shapes[operation->shape];
    const struct sim_part *part = sim_plans_part(world->plans, shape, operation->member->group.rank);
    const struct sim_clause *clauses = sim_plans_clauses(world->plans, part);
    bool right = true;
    for (uint32_t i = 0; right && i < part->clause_count; i++) {
        const struct sim_clause *clause = &clauses[i];
        if (clause->rank == SIM_ALL_RANKS) {
            if (work->reduced == NULL)
                work->reduced = sim_data_reduce(world, operation->call);
            bool lossy = shape->encoded > SIM_ENCODED_16;
            right = (lossy ? compare_lossy : compare)(world, operation, work->reduced + clause->source, clause);
            continue;
        }
        if (work->inputs == NULL)
            work->inputs = sim_new(shape->world, sizeof *work->inputs);
        if (work->inputs[clause->rank] == NULL) {
            work->inputs[clause->rank] = sim_new(shape->input_bytes, 1);
            sim_data_fill(world, operation->call, clause->rank, work->inputs[clause->rank], shape->input_bytes);
        }
        right = compare(world, operation, work->inputs[clause->rank] + clause->source, clause);
    }
}

/* ---- messages ---- */

/* How many messages of this tag the receives before this one took from the same rank. */
static uint32_t number_of_receive(const struct sim_world *world, const struct sim_operation *operation)
{
    const struct sim_call *calls = world->scenario->calls, *call = &calls[operation->call];
    const struct sim_operation *operations = operation->member->rank->operations;
    uint32_t before = 0;
    for (uint32_t i = 0; i < operation->call; i++)
        before += calls[i].kind == SIM_CALL_MESSAGE && calls[i].group == call->group && calls[i].to == call->to &&
                  calls[i].tag == call->tag && operations[i].state != SIM_UNCALLED &&
                  operations[i].operation.ticket.source == operation->operation.ticket.source;
    return before;
}

/* A receive has the bytes of the message that is next from its source. */
static void check_message(struct sim_world *world, const struct sim_operation *operation)
{
    const struct sim_call *call = &world->scenario->calls[operation->call];
    uint32_t source = operation->operation.ticket.source, number = number_of_receive(world, operation);
    uint32_t rank = operation->member->rank->id;
    if (source >= operation->member->group.size || (!call->any_source && source != call->from)) {
        sim_world_fail(world, "rank %u received call %u from rank %u of the group", rank, operation->call, source);
        return;
    }
    for (uint32_t i = 0; i < operation->output_bytes; i++) {
        if (operation->output[i] == sim_data_byte(world, call, source, number, i))
            continue;
        sim_world_fail(world, "rank %u has a wrong message of call %u: byte %u is not that of message %u from %u", rank,
                       operation->call, i, number, source);
        return;
    }
}

/* ---- operations ---- */

static bool is_mismatched(const struct sim_world *world, uint32_t call)
{
    for (uint32_t i = 0; i < world->scenario->fault_count; i++)
        if (world->scenario->faults[i].kind == SIM_FAULT_MISMATCH && world->scenario->faults[i].b == call)
            return true;
    return false;
}

/* Whether the rank that its group takes for lost has closed the group: to the others it is gone, if they still wait. */
static bool has_lost_a_leaver(const struct sim_operation *operation)
{
    const struct sim_member *member = operation->member;
    const struct sim_world *world = member->rank->world;
    uint32_t culprit = atomic_load(&member->group.culprit), index = world->scenario->calls[operation->call].group;
    const struct sim_group *group = &world->scenario->groups[index];
    return culprit < group->size && world->ranks[group->members[culprit]].members[index].state == SIM_LEFT;
}

static bool may_fail_with(const struct sim_operation *operation)
{
    const struct sim_scenario *scenario = operation->member->rank->world->scenario;
    int status = operation->status;
    if (scenario->groups[scenario->calls[operation->call].group].revives)
        return false;
    if (scenario->any_source && status == CL_ETIMEDOUT)
        return true;
    switch (scenario->story) {
    case SIM_STORY_DEATH:
    case SIM_STORY_FROZEN:
    case SIM_STORY_PARTITION:
        return status == CL_EPEERLOST || status == CL_EABORTED;
    case SIM_STORY_ABSENT:
        return status == CL_ETIMEDOUT || status == CL_EABORTED;
    case SIM_STORY_MISMATCH: /* a rank whose other call has ended may have closed the group before the others call */
        return status == CL_EMISMATCH || status == CL_EABORTED || status == CL_ETIMEDOUT ||
               (status == CL_EPEERLOST && has_lost_a_leaver(operation));
    case SIM_STORY_ABORT:
        return status == CL_EABORTED;
    case SIM_STORY_CLOSE: /* a rank of the host that has left posts no more */
        return status == CL_EABORTED || status == CL_ECLOSED || status == CL_ETIMEDOUT || status == CL_EPEERLOST;
    case SIM_STORY_SCARCE: /* a control packet that found no memory may be missed until the operation times out */
        return status == CL_ENOMEM || status == CL_EABORTED || status == CL_ETIMEDOUT;
    default:
        return false;
    }
}

/* Nobody waits in vain for a rank that has failed for want of memory. */
static void check_told(struct sim_world *world, const struct sim_operation *operation)
{
    uint32_t group = world->scenario->calls[operation->call].group;
    for (uint32_t rank = 0; rank < world->scenario->world; rank++) {
        const struct sim_member *member = &world->ranks[rank].members[group];
        if (member->rank != NULL && sim_member_status(member) == CL_ENOMEM)
            sim_world_fail(world, "call %u of rank %u times out: nobody has said that rank %u had no memory",
                           operation->call, operation->member->rank->id, rank);
    }
}

static uint64_t receives(const struct sim_world *world, const struct sim_operation *operation)
{
    if (world->scenario->calls[operation->call].kind == SIM_CALL_MESSAGE) /* within a host no packet carries it */
        return operation->operation.name == CL_LOCAL ? 0 : operation->output_bytes;
    const struct sim_part *part =
        sim_plans_part(world->plans, &world->plans->shapes[operation->shape], operation->member->group.rank);
    const struct cl_step *steps = sim_plans_steps(world->plans, part);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < part->step_count; i++)
        if (steps[i].kind == CL_RECV_COPY || steps[i].kind == CL_RECV_REDUCE)
            bytes += cl_step_codec(&steps[i]) == NULL
                         ? steps[i].length
                         : cl_codec_bytes(cl_step_codec(&steps[i]), steps[i].length / sizeof(float));
    return bytes;
}

/* The copies of eager sends keep their limit, and cost nothing once all have ended. */
static void check_eager(struct sim_world *world, const struct sim_member *member)
{
    uint64_t bytes = atomic_load(&member->eager.bytes);
    if (bytes > (member->in_flight > 0 ? CL_EAGER_LIMIT_BYTES : 0))
        sim_world_fail(world, "rank %u keeps %llu bytes of eager messages of a group", member->rank->id,
                       (unsigned long long)bytes);
}

static void check_ended(struct sim_world *world, struct sim_operation *operation)
{
    check_eager(world, operation->member);
    struct sim_rank *rank = operation->member->rank;
    world->unfinished -= operation->awaited;
    world->ended_ns = sim_world_now_ns(world);
    if (operation->status == CL_OK) {
        world->counts.operations_ok++;
        world->counts.messages_ok += operation->operation.kind == CL_OPERATION_RECEIVE;
        if (operation->operation.kind == CL_OPERATION_RECEIVE)
            check_message(world, operation);
        else if (operation->operation.kind == CL_OPERATION_SEND || is_mismatched(world, operation->call))
            ; /* there is no result, or it means nothing */
        else if (world->scenario->calls[operation->call].qos.loss_bound > 0)
            sim_account_keep(world, operation);
        else
            check_result(world, operation);
        world->counts.nan += world->scenario->calls[operation->call].nan;
        rank->expected_bytes += receives(world, operation) - sim_account_absent(operation);
    } else {
        world->counts.operations_failed++;
        if (operation->status == CL_ETIMEDOUT)
            check_told(world, operation);
        if (!may_fail_with(operation))
            sim_world_fail(world, "call %u of rank %u fails in a story of %s: %s", operation->call, rank->id,
                           sim_story_name(world->scenario->story), cl_error_text(operation->status));
    }
    if (operation->input != NULL)
        memset(operation->input, SCRIBBLE, operation->input_bytes);
    if (operation->output != NULL)
        memset(operation->output, SCRIBBLE, operation->output_bytes);
}

static void check_lost(struct sim_world *world, const struct sim_rank *rank, uint16_t peer)
{
    const struct sim_scenario *scenario = world->scenario;
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        if ((fault->kind == SIM_FAULT_DEATH && fault->a == peer) ||
            (scenario->story == SIM_STORY_FROZEN && fault->kind == SIM_FAULT_PAUSE &&
             (fault->a == peer || fault->a == rank->id)) ||
            (scenario->story == SIM_STORY_PARTITION && fault->kind == SIM_FAULT_CUT &&
             ((fault->a == rank->host && fault->b == world->ranks[peer].host) ||
              (fault->b == rank->host && fault->a == world->ranks[peer].host))))
            return;
    }
    sim_world_fail(world, "rank %u takes rank %u for lost, which lives and can be reached", rank->id, peer);
}

/* ---- memory, data in flight, turns ---- */

/* Whether a datagram is a later part of a packet that leaves in several. */
static bool continues_packet(const struct cl_datagram *datagram)
{
    struct cl_packet packet;
    return cl_packet_kind(datagram->head) == CL_PACKET_FRAGMENT &&
           cl_packet_decode(&packet, datagram->head, (size_t)datagram->head_length + datagram->payload_length) &&
           packet.offset > 0;
}

static void check_batch(struct sim_world *world, struct sim_rank *rank, uint16_t classes, uint32_t taken)
{
    enum { TURNS = 4 /* of the guard: refused turns lie between */ };
    uint16_t waiting = classes & rank->endpoint->queue.classes; /* these had something to send all the time */
    uint32_t last = waiting != 0 ? 31 - (uint32_t)__builtin_clz(waiting) : 0;
    last = cl_class_within_host((uint8_t)last); /* as packets have it */
    /* Acknowledgements and probes go first and take nobody's turn: one timeout can ask for a probe to every peer. */
    for (uint32_t i = rank->driver.batch_count - (taken < rank->driver.batch_count ? taken : rank->driver.batch_count);
         i < rank->driver.batch_count; i++)
        if (!continues_packet(&rank->driver.batch[i])) /* the guard counts packets */
            rank->starved = waiting == 0 || rank->driver.batch[i].priority >= last ? 0 : rank->starved + 1;
    if (rank->starved > TURNS * CL_QUEUE_GUARD)
        sim_world_fail(world, "rank %u has sent %u packets while its messages of class %u starve", rank->id,
                       rank->starved, last);
}

static void check_path(struct sim_world *world, struct sim_rank *rank, const struct cl_datagram *datagram)
{
    const struct cl_peer *peer = cl_peer_list_find(&rank->endpoint->peers, datagram->peer);
    const struct cl_path *path = &peer->paths[datagram->path];
    bool other = false;
    for (uint16_t i = 0; i < peer->path_count; i++)
        other = other || (!peer->paths[i].dead && !peer->paths[i].paused);
    if (datagram->message == NULL || continues_packet(datagram))
        return;
    rank->strays += path->paused && other;
    if (rank->strays > STRAYS_MOST * (world->scenario->world + 1))
        sim_world_fail(world, "rank %u sends data over path %u to rank %u, which is paused", rank->id, datagram->path,
                       datagram->peer);
}

/* In the memory of the host, no queue waits for another: the first operation of each runs once its gate is open. */
static void check_queues(struct sim_world *world, const struct sim_rank *rank)
{
    if (rank->busy || rank->first_open == rank->next_call)
        return;
    uint16_t *seen = sim_new(world->scenario->group_count, sizeof *seen);
    for (uint32_t call = rank->first_open; call < rank->next_call; call++) {
        const struct sim_operation *operation = &rank->operations[call];
        if (operation->state != SIM_IN_FLIGHT || !operation->operation.plan->uses_host)
            continue;
        const struct cl_group *group = &operation->member->group;
        uint16_t *queues = &seen[world->scenario->calls[call].group],
                 bit = (uint16_t)(1u << operation->operation.turn.queue);
        uint32_t behind;
        if (*queues & bit || operation->called_ns == sim_world_now_ns(world)) /* that one is yet to be looked at */
            continue;
        *queues |= bit;
        if (operation->operation.executor == NULL && group->status == CL_OK &&
            cl_host_queues_gate_is_open(&group->host_queues, &operation->operation.turn, &behind))
            sim_world_fail(world, "rank %u does not run call %u, though no other of its queue is before it", rank->id,
                           call);
    }
    free(seen);
}

struct look {
    struct sim_world *world;
    const struct sim_rank *rank;
};

/* A message that has not ended makes its sender act some time: packets are in flight or wait in the queue, the message
 * is held, or waits for credit, or a PROBE has asked the receiver, which answers with a STOP. */
static void look_at_message(struct cl_message *message, void *argument)
{
    const struct look *look = argument;
    struct cl_send *send = cl_message_as_send(message);
    if (send == NULL || send->packets_in_flight > 0 || send->queued || send->held || send->partial.stopped)
        return;
    if (cl_send_unsent(send) && !cl_send_sendable(send))
        return;
    if (cl_send_unsent(send) || !send->partial.has_run_out)
        sim_world_fail(look->world, "rank %u has forgotten message %u/%u/%u to rank %u: %u of %u packets have arrived",
                       look->rank->id, message->id.group, message->id.sequence, message->id.index, message->peer,
                       message->packets_arrived, message->packet_count);
}

static void check_turn(struct sim_world *world, struct sim_rank *rank)
{
    const struct cl_endpoint *endpoint = rank->endpoint;
    if (endpoint->unexpected.used_bytes > world->counts.most_unexpected_bytes)
        world->counts.most_unexpected_bytes = endpoint->unexpected.used_bytes;
    if (endpoint->unexpected.used_bytes > world->scenario->unexpected_limit_bytes)
        sim_world_fail(world, "rank %u keeps %zu bytes of unexpected packets; its limit is %llu", rank->id,
                       endpoint->unexpected.used_bytes, (unsigned long long)world->scenario->unexpected_limit_bytes);
    if (rank->spins > SPINS_MOST)
        sim_world_fail(world,
                       "the engine of rank %u spins: its timer is due again and again, and there is nothing to do",
                       rank->id);
    if (world->counts.turns % LOOK_EVERY != 0)
        return;
    check_queues(world, rank);
    struct look look = {world, rank};
    cl_table_each(&rank->endpoint->table, look_at_message, &look);
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        const struct cl_peer *peer = endpoint->peers.list[i];
        if (peer == NULL || !peer->alive)
            continue;
        if (peer->controls.count > CONTROLS_MOST + 2 * world->scenario->depth)
            sim_world_fail(world, "rank %u has %u control packets for rank %u", rank->id, peer->controls.count, i);
        for (uint16_t p = 0; p < peer->path_count; p++) {
            const struct cl_path *path = &peer->paths[p];
            if (path->sent.bytes > world->counts.most_flight_bytes)
                world->counts.most_flight_bytes = path->sent.bytes;
            if (path->sent.capacity > SENT_MOST)
                sim_world_fail(world, "rank %u remembers %u packets to rank %u", rank->id, path->sent.capacity, i);
            if (path->ack.came.count > CL_ACK_RANGES || path->ack.refused.count > CL_ACK_RANGES)
                sim_world_fail(world, "rank %u has %u ranges to acknowledge to rank %u", rank->id, path->ack.came.count,
                               i);
        }
    }
}

/* ---- attackers ---- */

/* Seals a packet anew with the key of the job, which is not that of its two ranks. */
static bool seal_by_job(const struct sim_rank *rank, uint8_t *bytes)
{
    struct cl_packet packet;
    if (!cl_packet_decode(&packet, bytes, rank->specimen_length) || packet.kind == CL_PACKET_ACK)
        return false;
    const struct cl_peer *peer = cl_peer_list_find(&rank->endpoint->peers, packet.source);
    if (peer == NULL || packet.path >= peer->path_count) /* bits of the specimen were flipped */
        return false;
    uint64_t number = peer->paths[packet.path].packets.next + 1;
    packet.number = (uint32_t)number;
    cl_packet_encode(&packet, bytes);
    cl_packet_seal(bytes, bytes + CL_PACKET_HEAD_BYTES, &rank->endpoint->seal, rank->id, number);
    return true;
}

static uint32_t make_attack(struct sim_world *world, const struct sim_rank *rank, uint8_t *bytes)
{
    struct sim_random *random = &world->random;
    uint32_t length = (uint32_t)sim_random_below(random, world->scenario->datagram_bytes + 1);
    if (rank->specimen_length == 0 || sim_random_chance(random, 0.3)) {
        for (uint32_t i = 0; i < length; i++)
            bytes[i] = (uint8_t)sim_random_next(random);
        return length;
    }
    /* a packet of this job with one field changed */
    memcpy(bytes, rank->specimen, rank->specimen_length);
    if (world->scenario->wiring.keys && sim_random_chance(random, 0.5) && seal_by_job(rank, bytes))
        return rank->specimen_length;
    switch (sim_random_below(random, 5)) {
    case 0: /* tag */
        bytes[32 + sim_random_below(random, 8)] ^= (uint8_t)sim_random_between(random, 1, 255);
        return rank->specimen_length;
    case 1: /* another life of the job */
        bytes[30] ^= (uint8_t)sim_random_between(random, 1, 255);
        return rank->specimen_length;
    case 2: /* an unknown source */
        cl_store_u16(bytes + 4, (uint16_t)sim_random_between(random, world->scenario->world, UINT16_MAX));
        return rank->specimen_length;
    case 3: /* cut off */
        return (uint32_t)sim_random_below(random, rank->specimen_length);
    default: /* an unknown path */
        cl_store_u16(bytes + 28, (uint16_t)sim_random_between(random, world->scenario->paths, UINT16_MAX));
        return rank->specimen_length;
    }
}

void sim_check_attack(struct sim_world *world, struct sim_rank *rank)
{
    struct cl_endpoint *endpoint = rank->endpoint;
    struct cl_engine_stats before = endpoint->stats;
    const struct cl_peer *urgent = endpoint->peers.urgent_last;
    uint32_t messages = endpoint->table.names.count;
    uint64_t timer_us = cl_endpoint_next_timeout(endpoint), now_us = sim_driver_now_us(&rank->driver);
    uint8_t *bytes = sim_new(world->scenario->datagram_bytes, 1);
    uint32_t length = make_attack(world, rank, bytes);
    cl_endpoint_receive(endpoint, bytes, length, false, now_us, now_us);
    free(bytes);
    world->counts.attacks++;
    if (endpoint->stats.packets_received != before.packets_received ||
        endpoint->stats.packets_unexpected != before.packets_unexpected ||
        endpoint->stats.packets_unexpected_dropped != before.packets_unexpected_dropped ||
        endpoint->stats.packets_duplicate != before.packets_duplicate ||
        endpoint->stats.payload_bytes_received != before.payload_bytes_received)
        sim_world_fail(world, "rank %u takes an attacker's packet for one of its job", rank->id);
    if (endpoint->peers.urgent_last != urgent || endpoint->table.names.count != messages ||
        cl_endpoint_next_timeout(endpoint) != timer_us)
        sim_world_fail(world, "rank %u is about to answer an attacker, or remembers it", rank->id);
}

/* ---- the end ---- */

/* A path that begins to lose full packets delays its data by about that much before they leave in fragments
 * (docs/faults.md): ranks wait for the one behind it first, and only then for the dead. */
static uint64_t hole_delay_ns(const struct sim_scenario *scenario)
{
    return scenario->peer_timeout_us * 1000 / 3 + 200000000;
}

/* The later of the last call by a live member and the fault, or the last packet of the dead, and the delays of holes:
 * from then on the clock of the peer timeout runs on every rank. */
static uint64_t clock_starts_ns(const struct sim_world *world, uint32_t call)
{
    const struct sim_scenario *scenario = world->scenario;
    uint64_t from_ns = world->last_words_ns;
    for (uint32_t i = 0; i < scenario->world; i++) {
        const struct sim_operation *operation = &world->ranks[i].operations[call];
        if (operation->member != NULL && !world->ranks[i].driver.dead && operation->called_ns > from_ns)
            from_ns = operation->called_ns;
    }
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        uint64_t until_ns =
            fault->at_ns + (fault->kind == SIM_FAULT_PAUSE || fault->kind == SIM_FAULT_SCARCE ? fault->for_ns : 0);
        bool counts = fault->kind == SIM_FAULT_DEATH || fault->kind == SIM_FAULT_SCARCE ||
                      fault->kind == SIM_FAULT_PAUSE || fault->kind == SIM_FAULT_CUT;
        if (counts && until_ns > from_ns)
            from_ns = until_ns;
    }
    for (uint32_t i = 0; i < scenario->fault_count; i++)
        if (scenario->faults[i].kind == SIM_FAULT_HOLE)
            from_ns += hole_delay_ns(scenario);
    return from_ns;
}

/* Whether the operation may wait until a timeout, its own or that of one it waits for: a receive from any source waits
 * for the living beside the dead. Nobody but the dead is left where a group of two has lost one. */
static bool may_time_out(const struct sim_world *world, const struct sim_operation *operation)
{
    const struct sim_group *group = &world->scenario->groups[world->scenario->calls[operation->call].group];
    return world->scenario->story == SIM_STORY_SCARCE ||
           (world->scenario->any_source && (group->size > 2 || world->scenario->story != SIM_STORY_DEATH));
}

static void check_delay(struct sim_world *world, const struct sim_operation *operation)
{
    const struct sim_scenario *scenario = world->scenario;
    uint64_t from_ns = clock_starts_ns(world, operation->call);
    uint64_t allowed_us = scenario->peer_timeout_us + scenario->peer_timeout_us / 10; /* see cl_peer_lost_us */
    if (scenario->story == SIM_STORY_ABSENT || scenario->story == SIM_STORY_MISMATCH ||
        scenario->story == SIM_STORY_CLOSE) {
        from_ns = operation->called_ns;
        allowed_us = scenario->timeout_us;
    }
    if (scenario->story ==
        SIM_STORY_PARTITION) /* a rank that still hears the others may have to wait until they fall silent */
        allowed_us *= 2;
    uint64_t until_ns = from_ns + allowed_us * 1000 + SLACK_NS;
    if (may_time_out(world, operation) && until_ns < operation->called_ns + 1000 * scenario->timeout_us + SLACK_NS)
        until_ns = operation->called_ns + 1000 * scenario->timeout_us + SLACK_NS;
    if (operation->status != CL_OK && operation->ended_ns > until_ns)
        sim_world_fail(world, "call %u of rank %u fails only after %.3f s (%.3f s are documented)", operation->call,
                       operation->member->rank->id, (double)(operation->ended_ns - from_ns) / 1e9,
                       (double)allowed_us / 1e6);
}

static bool is_scribbled(const uint8_t *buffer, uint64_t bytes)
{
    return bytes == 0 || (buffer[0] == SCRIBBLE && memcmp(buffer, buffer + 1, bytes - 1) == 0);
}

/* A rank that never made a call hears that it failed for the others. */
static void check_absent(struct sim_world *world)
{
    for (uint32_t i = 0; i < world->scenario->fault_count; i++) {
        const struct sim_fault *fault = &world->scenario->faults[i];
        if (fault->kind != SIM_FAULT_ABSENT)
            continue;
        uint32_t group = world->scenario->calls[fault->b].group;
        for (uint32_t rank = 0; rank < world->scenario->world; rank++) {
            const struct sim_member *member = &world->ranks[rank].members[group];
            if (member->rank != NULL && sim_member_status(member) != CL_OK &&
                sim_member_status(&world->ranks[fault->a].members[group]) == CL_OK)
                sim_world_fail(world, "rank %u has not heard that group %u failed, as rank %u knows", fault->a,
                               group + 1, rank);
        }
    }
}

/* Ranks that called different collectives hear of it, at the latest with the next one of the group that moves bytes. */
static void check_mismatch(struct sim_world *world)
{
    const struct sim_scenario *scenario = world->scenario;
    if (scenario->story != SIM_STORY_MISMATCH || world->calm)
        return;
    const struct sim_fault *fault = &scenario->faults[0];
    const struct sim_call *call = &scenario->calls[fault->b];
    bool differs = call->kind == SIM_CALL_COLLECTIVE && (uint32_t)fault->amount != call->shape, again = false;
    for (uint32_t i = fault->b + 1; i < scenario->call_count; i++)
        again = again || (scenario->calls[i].kind == SIM_CALL_COLLECTIVE && scenario->calls[i].group == call->group &&
                          world->plans->shapes[scenario->calls[i].shape].numel > 0);
    for (uint32_t rank = 0; differs && again && rank < scenario->world; rank++) {
        const struct sim_member *member = &world->ranks[rank].members[call->group];
        if (member->rank != NULL && member->state != SIM_LEFT && sim_member_status(member) == CL_OK)
            sim_world_fail(world, "rank %u has not heard that rank %u made another call %u", rank, fault->a, fault->b);
    }
}

/* A group that lost a rank names it. */
static void check_culprit(struct sim_world *world, const struct sim_rank *rank)
{
    if (world->scenario->story != SIM_STORY_DEATH)
        return;
    for (const struct cl_group *group = rank->groups.first; group != NULL; group = group->next)
        if (group->status == CL_EPEERLOST &&
            (group->culprit >= group->size || !world->ranks[group->peers[group->culprit]].driver.dead))
            sim_world_fail(world, "rank %u takes rank %d of group %u for the lost one", rank->id, (int)group->culprit,
                           group->id);
}

/* The sender knows that switches mark its packets. */
static void check_marks(struct sim_world *world, const struct sim_rank *rank)
{
    for (uint32_t i = 0; i < rank->endpoint->peers.length; i++) {
        const struct cl_peer *to = rank->endpoint->peers.list[i];
        const struct cl_peer *from = to == NULL ? NULL : cl_peer_list_find(&world->ranks[i].endpoint->peers, rank->id);
        for (uint16_t p = 0; from != NULL && p < from->path_count; p++)
            if (from->paths[p].ack.marked >= MARKS_LEAST && from->paths[p].ack.marked < CL_ACK_MARKS &&
                to->paths[p].marked == 0 && to->paths[p].deaths == 0)
                sim_world_fail(world, "rank %u has not heard that %u of its packets to rank %u were marked", rank->id,
                               from->paths[p].ack.marked, i);
    }
}

static void check_rank(struct sim_world *world, const struct sim_rank *rank)
{
    bool clean = true;
    check_culprit(world, rank);
    for (uint32_t call = 0; call < world->scenario->call_count; call++) {
        const struct sim_operation *operation = &rank->operations[call];
        if (operation->member == NULL)
            continue;
        clean = clean && operation->state == SIM_ENDED && operation->status == CL_OK && !is_mismatched(world, call);
        if (operation->state != SIM_ENDED)
            continue;
        check_delay(world, operation);
        if (!is_scribbled(operation->input, operation->input_bytes) ||
            !is_scribbled(operation->output, operation->output_bytes))
            sim_world_fail(world, "something wrote into buffers of rank %u after call %u had ended", rank->id, call);
    }
    if (sim_story_must_succeed(world->scenario->story))
        check_marks(world, rank);
    const struct cl_engine_stats *stats = cl_endpoint_stats(rank->endpoint);
    uint64_t received = stats->payload_bytes_received;
    if (stats->packets_retransmitted != stats->retransmitted_lost + stats->retransmitted_refused +
                                            stats->retransmitted_probes + stats->retransmitted_early)
        sim_world_fail(world, "rank %u cannot explain all of its retransmissions", rank->id);
    if (clean && received != rank->expected_bytes)
        sim_world_fail(world, "%llu bytes were delivered at rank %u; its plans receive %llu",
                       (unsigned long long)received, rank->id, (unsigned long long)rank->expected_bytes);
    /* without memory, a finished message may be forgotten, and taken for new when a packet of it comes again */
    bool scarce = world->scenario->story == SIM_STORY_SCARCE;
    if (clean && !scarce && rank->endpoint->unexpected.used_bytes > 0)
        sim_world_fail(world, "rank %u keeps %zu bytes of unexpected packets, for nothing", rank->id,
                       rank->endpoint->unexpected.used_bytes);
    for (uint32_t i = 0; clean && i < rank->endpoint->peers.length; i++)
        if (rank->endpoint->peers.list[i] != NULL && rank->endpoint->peers.list[i]->outstanding > 0)
            sim_world_fail(world, "rank %u has messages with rank %u left over", rank->id, i);
}

void sim_check_end(struct sim_world *world)
{
    for (uint32_t i = 0; i < world->scenario->world && world->failure[0] == 0; i++)
        if (!world->ranks[i].driver.dead)
            check_rank(world, &world->ranks[i]);
    for (uint32_t call = 0; call < world->scenario->call_count && world->failure[0] == 0; call++)
        if (world->scenario->calls[call].qos.loss_bound > 0)
            sim_account_check(world, call);
    if (world->failure[0] == 0)
        check_absent(world);
    if (world->failure[0] == 0)
        check_mismatch(world);
}

const struct sim_checks sim_checks = {check_ended, check_lost, check_batch, check_path, check_turn};
