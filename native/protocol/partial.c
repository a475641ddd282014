#include "protocol/partial.h"

#include "protocol/stop.h"

enum {
    REORDER_MIN_US = 100, /* a receiver gets its packets in batches anyway */
    REORDER_MAX_US = 20000,
    WARY_US = 20000,      /* for refused packets to be sent again: see CL_PEER_HELD_MIN_US */
    STALL_MIN_US = 5000,  /* a pause of a sender that is no reason to go on without it */
    NO_MEMORY_US = 10000, /* until a message that cannot be ended for want of memory is tried again */
};

/* ---- which packets are protected ---- */

static bool is_protected(const struct cl_endpoint *endpoint, const struct cl_message *message, uint32_t packet)
{
    const struct cl_message_bound *bound = &message->bound;
    if (packet < bound->protect_first || packet >= message->packet_count - bound->protect_last)
        return true;
    if (!bound->protect)
        return false;
    uint32_t payload_bytes = endpoint->peers[message->peer]->payload_bytes;
    uint64_t start = (uint64_t)packet * payload_bytes, end = start + payload_bytes;
    end = end < message->length ? end : message->length;
    uint64_t bit = (bound->protect_offset + start) / bound->protect_bytes;
    uint64_t last = (bound->protect_offset + end - 1) / bound->protect_bytes;
    for (; bit <= last; bit++)
        if (bound->protect[bit / 64] >> (bit % 64) & 1)
            return true;
    return false;
}

/* ---- at the sender ---- */

void cl_partial_begin_send(struct cl_endpoint *endpoint, struct cl_message *message, const struct cl_qos *qos)
{
    uint32_t budget = cl_partial_budget(message->packet_count, qos->loss_ppm);
    if (!budget)
        return;
    uint32_t most = message->packet_count;
    message->bound = (struct cl_message_bound){
        .budget = budget,
        .guarded = qos->protect || qos->protect_first || qos->protect_last,
        .protect_first = qos->protect_first < most ? qos->protect_first : most,
        .protect_last = qos->protect_last < most ? qos->protect_last : most,
        .protect = qos->protect,
        .protect_bytes = qos->protect_bytes,
        .protect_offset = qos->protect_offset,
    };
    for (uint32_t packet = 0; message->bound.guarded && packet < message->packet_count; packet++)
        message->bound.protected_packets += is_protected(endpoint, message, packet);
    message->bound.protected_told = message->bound.protected_packets;
}

uint8_t cl_partial_flags(struct cl_endpoint *endpoint, const struct cl_message *message, uint32_t packet)
{
    const struct cl_message_bound *bound = &message->bound;
    if (!bound->budget)
        return 0;
    bool droppable = !bound->guarded || !is_protected(endpoint, message, packet);
    bool safe = !bound->protected_packets, tail = safe && !cl_message_sendable(message);
    return (uint8_t)((droppable ? CL_PACKET_DROPPABLE : 0) | (safe ? CL_PACKET_SAFE : 0) | (tail ? CL_PACKET_TAIL : 0));
}

bool cl_partial_give_up(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet)
{
    struct cl_message_bound *bound = &message->bound;
    if (!bound->budget)
        return false;
    if (cl_message_is_done(message, packet) || cl_ranges_contains(&message->forgone, packet))
        return true; /* another copy of it has come, or was lost before */
    if (bound->given_up == bound->budget || (bound->guarded && is_protected(endpoint, message, packet)) ||
        !cl_ranges_add(&message->forgone, packet, (uint64_t)packet + 1))
        return false;
    bound->given_up++;
    endpoint->stats.packets_given_up++;
    return true;
}

void cl_partial_done(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet)
{
    struct cl_message_bound *bound = &message->bound;
    if (!bound->budget)
        return;
    bound->given_up -= cl_ranges_contains(&message->forgone, packet);
    if (bound->guarded)
        bound->protected_packets -= is_protected(endpoint, message, packet);
}

void cl_partial_run_out(struct cl_endpoint *endpoint, struct cl_message *message)
{
    struct cl_message_bound *bound = &message->bound;
    if (!bound->budget || bound->told_budget || cl_message_sendable(message) ||
        (!bound->given_up && !bound->protected_packets))
        return;
    bound->told_budget = bound->budget;
    cl_endpoint_tell(
        endpoint, endpoint->peers[message->peer], CL_PACKET_PROBE,
        (struct cl_control){.group = message->id.group, .sequence = message->id.sequence, .index = message->id.index});
}

void cl_partial_on_probe_refused(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_control *probe)
{
    struct cl_message_id id = {probe->group, probe->sequence, probe->index};
    struct cl_message *message = cl_table_find(&endpoint->table, CL_MESSAGE_SEND, peer->id, &id);
    if (!message || message->bound.stopped)
        return;
    message->bound.told_budget = 0;
    if (message->packets_done) /* by now the receiver knows it; else once the first packet is acknowledged */
        cl_partial_run_out(endpoint, message);
}

/* The message is over but for what later parts of its STOP say: nothing of it is sent or awaited any more. */
static void begin_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_message *message)
{
    if (message->queued)
        cl_queue_remove(&endpoint->queue, &peer->node, message);
    if (message->held)
        cl_peer_unhold(peer, message);
    message->bound.stopped = true;
    message->next_packet = message->packet_count;
    cl_ranges_clear(&message->lost);
    cl_ranges_clear(&message->forgone);
}

/* From now on a bit means counted, not acknowledged. */
static void take_over(struct cl_message *message, uint32_t first, uint32_t part, const uint8_t *payload)
{
    for (uint32_t i = 0; i < part && first + i < message->packet_count; i++) {
        uint32_t packet = first + i;
        bool counted = !(payload[i / 8] >> (i % 8) & 1);
        message->packets_done += counted;
        message->packets_done -= cl_message_is_done(message, packet);
        uint64_t bit = (uint64_t)1 << (packet % 64);
        message->bits[packet / 64] = counted ? message->bits[packet / 64] | bit : message->bits[packet / 64] & ~bit;
    }
}

bool cl_partial_on_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                        const uint8_t *payload)
{
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_message *message = cl_table_find(&endpoint->table, CL_MESSAGE_SEND, peer->id, &id);
    if (!message)
        return true; /* over here, too */
    uint32_t first = packet->offset, part = cl_stop_part(peer->payload_bytes);
    if (!message->bound.budget || first % part || first >= message->packet_count ||
        (packet->length && packet->length != cl_stop_bytes(message->packet_count, part, first)))
        return false;
    if (!packet->length) { /* everything was counted */
        message->packets_done = message->packet_count;
        cl_endpoint_complete(endpoint, message, CL_OK);
        return true;
    }
    if (!message->bound.stopped)
        begin_stop(endpoint, peer, message);
    uint64_t end = (uint64_t)first + part;
    end = end < message->packet_count ? end : message->packet_count;
    if (!cl_ranges_contains(&message->forgone, first))
        take_over(message, first, part, payload);
    if (!cl_ranges_add(&message->forgone, first, end))
        return true; /* no memory: the message ends when its peer or group does */
    const struct cl_range *told = message->forgone.list;
    if (told->start == 0 && told->end == message->packet_count) {
        bool agreed = message->packet_count - message->packets_done <= message->bound.budget;
        cl_endpoint_complete(endpoint, message, agreed ? CL_OK : CL_EMISMATCH);
    }
    return true;
}

/* ---- at the receiver ---- */

static void tell_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                      uint32_t first)
{
    cl_endpoint_tell(endpoint, peer, CL_PACKET_STOP,
                     (struct cl_control){
                         .group = id->group, .sequence = id->sequence, .index = id->index, .reason = (int32_t)first});
}

/* How long after the latest packet others that were sent before it may come. */
static uint64_t reordering_us(const struct cl_peer *peer, const struct cl_message *message)
{
    uint64_t longest_us = 0, round_trip_us = 0;
    for (uint16_t i = 0; i < peer->path_count; i++) {
        const struct cl_path *path = &peer->paths[i];
        if (path->dead)
            continue;
        /* Within a path it is a small part of a round trip, as in QUIC; another path may be longer by all of it. */
        uint64_t us = peer->path_count > 1 ? path->rtt.smoothed_us : cl_rtt_base_us(&path->rtt) / 4;
        longest_us = us > longest_us ? us : longest_us;
        round_trip_us = path->rtt.smoothed_us > round_trip_us ? path->rtt.smoothed_us : round_trip_us;
    }
    longest_us = longest_us > peer->reordering_us ? longest_us : peer->reordering_us;
    longest_us = longest_us > REORDER_MIN_US ? longest_us : REORDER_MIN_US;
    longest_us = longest_us < REORDER_MAX_US ? longest_us : REORDER_MAX_US;
    return message->bound.wary ? longest_us + WARY_US + 2 * round_trip_us : longest_us;
}

static uint64_t stall_us(const struct cl_peer *peer)
{
    uint64_t longest_us = STALL_MIN_US;
    for (uint16_t i = 0; i < peer->path_count; i++)
        if (!peer->paths[i].dead && 4 * (uint64_t)peer->paths[i].rtt.smoothed_us > longest_us)
            longest_us = 4 * (uint64_t)peer->paths[i].rtt.smoothed_us;
    return longest_us;
}

/* When the message may end as things are; UINT64_MAX: not yet. */
static uint64_t ends_us(const struct cl_peer *peer, const struct cl_message *message)
{
    const struct cl_message_bound *bound = &message->bound;
    if (message->packet_count - message->packets_done > bound->budget)
        return UINT64_MAX;
    bool probed = bound->told_budget != 0;
    bool all_protected = bound->safe || (probed && bound->protected_packets >= bound->protected_told);
    if ((bound->exhausted || probed) && all_protected)
        return bound->arrived_us + reordering_us(peer, message);
    if (bound->deadline_us == UINT64_MAX || (bound->guarded && !all_protected))
        return UINT64_MAX;
    uint64_t stalled_us = bound->arrived_us + stall_us(peer);
    return stalled_us > bound->deadline_us ? stalled_us : bound->deadline_us;
}

static void schedule(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_message *message, uint64_t when_us)
{
    if (when_us == UINT64_MAX)
        return;
    if (!message->bound.ending) {
        message->bound.ending = true;
        message->previous = NULL;
        message->next = peer->ending_first;
        if (message->next)
            message->next->previous = message;
        peer->ending_first = message;
    }
    if (when_us < peer->ending_us) {
        peer->ending_us = when_us;
        cl_endpoint_arm(endpoint, peer, when_us);
    }
}

void cl_partial_forget(struct cl_peer *peer, struct cl_message *message)
{
    message->bound.ending = false;
    *(message->previous ? &message->previous->next : &peer->ending_first) = message->next;
    if (message->next)
        message->next->previous = message->previous;
    message->previous = message->next = NULL;
}

static void mismatch(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_message *message)
{
    cl_history_add(&peer->history, &message->id);
    cl_endpoint_tell(
        endpoint, peer, CL_PACKET_MISMATCH,
        (struct cl_control){.group = message->id.group, .sequence = message->id.sequence, .index = message->id.index});
    cl_endpoint_complete(endpoint, message, CL_EMISMATCH);
}

void cl_partial_begin_receive(struct cl_endpoint *endpoint, struct cl_message *message, const struct cl_qos *qos,
                              bool wary, uint64_t now_us)
{
    struct cl_message_bound *bound = &message->bound; /* a PROBE may have come before */
    bound->budget = cl_partial_budget(message->packet_count, qos->loss_ppm);
    if (bound->told_budget && bound->told_budget != bound->budget) {
        mismatch(endpoint, endpoint->peers[message->peer], message);
        return;
    }
    if (!bound->budget)
        return;
    bound->guarded = qos->protect || qos->protect_first || qos->protect_last;
    bound->wary = wary;
    bound->arrived_us = now_us;
    bound->deadline_us = qos->deadline_us ? now_us + qos->deadline_us : UINT64_MAX;
    schedule(endpoint, endpoint->peers[message->peer], message, bound->deadline_us);
}

void cl_partial_on_packet(struct cl_endpoint *endpoint, struct cl_message *message, uint8_t flags, bool placed,
                          uint64_t now_us)
{
    struct cl_message_bound *bound = &message->bound;
    if (!bound->budget)
        return;
    struct cl_peer *peer = endpoint->peers[message->peer];
    bound->protected_packets += placed && !(flags & CL_PACKET_DROPPABLE);
    bound->safe |= (flags & CL_PACKET_SAFE) != 0;
    bound->exhausted |= (flags & CL_PACKET_TAIL) != 0;
    bound->arrived_us = now_us;
    if (bound->exhausted || bound->told_budget)
        schedule(endpoint, peer, message, ends_us(peer, message));
}

bool cl_partial_is_late(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                        uint32_t packet)
{
    const struct cl_stop *stop = peer->stops.first ? cl_stops_find(&peer->stops, id) : NULL;
    if (!stop)
        return false;
    if (!cl_stop_counts(stop, packet)) {
        endpoint->stats.packets_late++;
        peer->reordering_us = 2 * peer->reordering_us + REORDER_MIN_US;
        if (peer->reordering_us > REORDER_MAX_US)
            peer->reordering_us = REORDER_MAX_US;
    }
    return true;
}

/* A PROBE came for a message that is not in the table. */
static enum cl_probed on_probe_of_none(struct cl_endpoint *endpoint, struct cl_peer *peer,
                                       const struct cl_message_id *id)
{
    const struct cl_closed_group *retired = cl_closed_groups_find(&endpoint->retired, id->group);
    if (retired && retired->reason)
        cl_endpoint_tell(endpoint, peer, CL_PACKET_ABORT,
                         cl_control_abort(retired->group, retired->reason, retired->blame));
    else if (!retired && !cl_history_contains(&peer->history, id))
        return CL_PROBED_NOTHING;
    else if (!cl_stops_find(&peer->stops, id))
        tell_stop(endpoint, peer, id, 0); /* complete before it knew */
    return CL_PROBED;
}

enum cl_probed cl_partial_on_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                                   const uint8_t *payload, uint64_t now_us)
{
    if (packet->length != CL_PROBE_BYTES || !cl_load_u32(payload + 4))
        return CL_PROBED_MALFORMED;
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_message *message = cl_table_find(&endpoint->table, CL_MESSAGE_RECEIVE, peer->id, &id);
    if (!message)
        return on_probe_of_none(endpoint, peer, &id);
    struct cl_message_bound *bound = &message->bound;
    bound->protected_told = cl_load_u32(payload);
    bound->told_budget = cl_load_u32(payload + 4);
    if (message->posted && bound->told_budget != bound->budget) {
        mismatch(endpoint, peer, message);
    } else if (message->posted) {
        bound->arrived_us = now_us;
        schedule(endpoint, peer, message, ends_us(peer, message));
    }
    return CL_PROBED;
}

void cl_partial_complete(struct cl_endpoint *endpoint, const struct cl_message *message)
{
    if (message->bound.told_budget)
        tell_stop(endpoint, endpoint->peers[message->peer], &message->id, 0);
}

static bool stop(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_message *message)
{
    uint32_t part = cl_stop_part(peer->payload_bytes);
    if (!cl_stops_add(&peer->stops, message, part))
        return false;
    for (uint32_t first = 0; first < message->packet_count; first += part)
        tell_stop(endpoint, peer, &message->id, first);
    endpoint->stats.messages_stopped++;
    peer->reordering_us -= peer->reordering_us / 64;
    cl_history_add(&peer->history, &message->id);
    cl_endpoint_complete(endpoint, message, CL_OK);
    return true;
}

void cl_partial_service(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    uint64_t next_us = UINT64_MAX;
    for (struct cl_message *message = peer->ending_first, *next; message; message = next) {
        next = message->next;
        uint64_t when_us = ends_us(peer, message);
        if (when_us <= now_us) {
            if (stop(endpoint, peer, message))
                continue;
            when_us = now_us + NO_MEMORY_US;
        }
        next_us = when_us < next_us ? when_us : next_us;
    }
    peer->ending_us = next_us;
}

/* ---- both ---- */

int cl_partial_write(const struct cl_endpoint *endpoint, const struct cl_peer *peer, uint8_t kind,
                     const struct cl_control *control, uint8_t *payload)
{
    struct cl_message_id id = {control->group, control->sequence, control->index};
    if (kind == CL_PACKET_STOP) {
        const struct cl_stop *record = cl_stops_find(&peer->stops, &id);
        if (!record)
            return 0;
        cl_stop_write(record, (uint32_t)control->reason, payload);
        return (int)cl_stop_bytes(record->packet_count, record->part, (uint32_t)control->reason);
    }
    if (kind != CL_PACKET_PROBE)
        return 0;
    const struct cl_message *message = cl_table_find(&endpoint->table, CL_MESSAGE_SEND, peer->id, &id);
    if (!message || !message->bound.told_budget)
        return -1;
    cl_store_u32(payload, message->bound.protected_told);
    cl_store_u32(payload + 4, message->bound.budget);
    return CL_PROBE_BYTES;
}
