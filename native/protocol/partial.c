#include "protocol/partial.h"

#include "protocol/messages.h"
#include "protocol/stop.h"

enum {
    REORDER_MIN_US = 100, /* a receiver takes its packets in batches anyway */
    REORDER_MAX_US = 20000,
    WARY_US = 20000,      /* the time until refused packets are sent again: see CL_PEER_HELD_MIN_US */
    STALL_MIN_US = 5000,  /* shorter pauses of a sender are no stall */
    NO_MEMORY_US = 10000, /* time until ending a message is tried again after it failed for want of memory */
};

/* ---- which packets are protected ---- */

static bool is_protected(const struct cl_send *send, uint32_t packet)
{
    const struct cl_send_partial *partial = &send->partial;
    if (packet < partial->protect_first || packet >= send->message.packet_count - partial->protect_last)
        return true;
    if (partial->protect == NULL)
        return false;
    uint64_t start = packet * partial->packet_values, end = start + partial->packet_values;
    end = end < partial->values ? end : partial->values;
    uint64_t bit = (partial->protect_offset + start) / partial->protect_bytes;
    uint64_t last = (partial->protect_offset + end - 1) / partial->protect_bytes;
    for (; bit <= last; bit++)
        if (partial->protect[bit / 64] >> (bit % 64) & 1)
            return true;
    return false;
}

/* ---- at the sender ---- */

void cl_partial_begin_send(struct cl_send *send, const struct cl_qos *qos)
{
    uint32_t budget = cl_partial_loss_budget(send->message.packet_count, qos->loss_bound);
    if (!budget)
        return;
    uint32_t most = send->message.packet_count;
    send->message.loss_budget = budget;
    send->partial = (struct cl_send_partial){
        .guarded = qos->protect != NULL || qos->protect_first || qos->protect_last,
        .protect_first = qos->protect_first < most ? qos->protect_first : most,
        .protect_last = qos->protect_last < most ? qos->protect_last : most,
        .protect = qos->protect,
        .protect_bytes = qos->protect_bytes,
        .protect_offset = qos->protect_offset,
        .packet_values = send->message.packet_bytes,
        .values = send->message.length,
    };
    if (qos->blocks.encoded_bytes) {
        send->partial.packet_values = send->message.packet_bytes / qos->blocks.encoded_bytes * qos->blocks.value_bytes;
        send->partial.values = qos->blocks.length;
    }
    for (uint32_t packet = 0; send->partial.guarded && packet < send->message.packet_count; packet++)
        send->partial.protected_count += is_protected(send, packet);
}

uint8_t cl_partial_flags(const struct cl_send *send, uint32_t packet)
{
    const struct cl_send_partial *partial = &send->partial;
    if (!send->message.loss_budget)
        return 0;
    bool droppable = !partial->guarded || !is_protected(send, packet);
    bool safe = partial->protected_arrived == partial->protected_count, tail = safe && !cl_send_unsent(send);
    return (uint8_t)((droppable ? CL_PACKET_DROPPABLE : 0) | (safe ? CL_PACKET_SAFE : 0) | (tail ? CL_PACKET_TAIL : 0));
}

bool cl_partial_give_up(struct cl_endpoint *endpoint, struct cl_send *send, uint32_t packet)
{
    struct cl_send_partial *partial = &send->partial;
    if (!send->message.loss_budget)
        return false;
    if (cl_message_has_arrived(&send->message, packet) || cl_ranges_contains(&send->forgone, packet))
        return true; /* another copy has arrived, or was given up before */
    if (partial->given_up == send->message.loss_budget || (partial->guarded && is_protected(send, packet)) ||
        !cl_ranges_add(&send->forgone, packet, (uint64_t)packet + 1))
        return false;
    partial->given_up++;
    endpoint->stats.packets_given_up++;
    return true;
}

void cl_partial_done(struct cl_send *send, uint32_t packet)
{
    struct cl_send_partial *partial = &send->partial;
    if (!send->message.loss_budget)
        return;
    partial->given_up -= cl_ranges_contains(&send->forgone, packet);
    if (partial->guarded)
        partial->protected_arrived += is_protected(send, packet);
}

void cl_partial_run_out(struct cl_endpoint *endpoint, struct cl_send *send)
{
    struct cl_send_partial *partial = &send->partial;
    if (!send->message.loss_budget || partial->has_run_out || cl_send_unsent(send) ||
        (!partial->given_up && partial->protected_arrived == partial->protected_count))
        return;
    partial->has_run_out = true;
    cl_peer_list_tell(&endpoint->peers, endpoint->peers.list[send->message.peer], CL_PACKET_PROBE,
                      cl_control_message(&send->message.id));
}

void cl_partial_on_probe_refused(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_control *probe)
{
    struct cl_message_id id = cl_control_id(probe);
    struct cl_send *send = cl_table_find_send(&endpoint->table, peer->id, &id);
    if (send == NULL || send->partial.stopped)
        return;
    send->partial.has_run_out = false;
    if (send->message
            .packets_arrived) /* the receiver knows the message; else the first acknowledgement repeats the PROBE */
        cl_partial_run_out(endpoint, send);
}

/* Notes the packets from `first` on that the receiver counted, by a part of its STOP. */
static void count(struct cl_send *send, uint32_t first, uint32_t part, const uint8_t *payload)
{
    for (uint32_t i = 0; i < part && first + i < send->message.packet_count; i++) {
        uint64_t counted = !(payload[i / 8] >> (i % 8) & 1);
        send->packets_counted += (uint32_t)counted;
        send->counted[(first + i) / 64] |= counted << ((first + i) % 64);
    }
}

bool cl_partial_on_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                        const uint8_t *payload)
{
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_send *send = cl_table_find_send(&endpoint->table, peer->id, &id);
    if (send == NULL)
        return true; /* the message has ended here, too */
    uint32_t first = cl_control_read(packet).first_packet, part = cl_stop_part(peer->payload_bytes);
    if (!send->message.loss_budget || first % part || first >= send->message.packet_count ||
        (packet->length && packet->length != cl_stop_bytes(send->message.packet_count, part, first)))
        return false;
    if (!packet->length) { /* every packet was counted */
        send->message.packets_arrived = send->message.packet_count;
        send->partial.stopped = false;
        cl_messages_complete(endpoint, &send->message, CL_OK);
        return true;
    }
    if (!send->partial.stopped) {
        if (send->queued)
            cl_queue_remove(&endpoint->queue, &peer->node, send);
        if (send->held)
            cl_peer_unhold(peer, send);
        if (!cl_send_stop(send)) {
            cl_messages_complete(endpoint, &send->message, CL_ENOMEM);
            return true;
        }
    }
    uint64_t end = (uint64_t)first + part;
    end = end < send->message.packet_count ? end : send->message.packet_count;
    if (!cl_ranges_contains(&send->stop_told, first))
        count(send, first, part, payload);
    if (!cl_ranges_add(&send->stop_told, first, end)) { /* this STOP will not come again */
        cl_messages_complete(endpoint, &send->message, CL_ENOMEM);
        return true;
    }
    const struct cl_range *told = send->stop_told.list;
    if (told->start == 0 && told->end == send->message.packet_count) {
        bool agreed = send->message.packet_count - send->packets_counted <= send->message.loss_budget;
        cl_messages_complete(endpoint, &send->message, agreed ? CL_OK : CL_EMISMATCH);
    }
    return true;
}

/* ---- at the receiver ---- */

static void tell_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                      uint32_t first_packet)
{
    cl_peer_list_tell(
        &endpoint->peers, peer, CL_PACKET_STOP,
        (struct cl_control){
            .group = id->group, .sequence = id->sequence, .index = id->index, .first_packet = first_packet});
}

/* How long after the latest packet a packet that was sent before it may still come. */
static uint64_t reordering_us(const struct cl_peer *peer, const struct cl_receive *receive)
{
    uint64_t longest_us = 0, round_trip_us = 0;
    for (uint16_t i = 0; i < peer->path_count; i++) {
        const struct cl_path *path = &peer->paths[i];
        if (path->dead)
            continue;
        /* Within one path it is a fraction of the round trip, as in QUIC; another path may take a whole one longer. */
        uint64_t us = peer->path_count > 1 ? path->rtt.smoothed_us : cl_rtt_base_us(&path->rtt) / 4;
        longest_us = us > longest_us ? us : longest_us;
        round_trip_us = path->rtt.smoothed_us > round_trip_us ? path->rtt.smoothed_us : round_trip_us;
    }
    longest_us = longest_us > peer->reordering_us ? longest_us : peer->reordering_us;
    longest_us = longest_us > REORDER_MIN_US ? longest_us : REORDER_MIN_US;
    longest_us = longest_us < REORDER_MAX_US ? longest_us : REORDER_MAX_US;
    return receive->partial.wary ? longest_us + WARY_US + 2 * round_trip_us : longest_us;
}

static uint64_t stall_us(const struct cl_peer *peer)
{
    uint64_t longest_us = STALL_MIN_US;
    for (uint16_t i = 0; i < peer->path_count; i++)
        if (!peer->paths[i].dead && 4 * (uint64_t)peer->paths[i].rtt.smoothed_us > longest_us)
            longest_us = 4 * (uint64_t)peer->paths[i].rtt.smoothed_us;
    return longest_us;
}

/* The time when the message may end if no further packet comes; UINT64_MAX: it may not. */
static uint64_t ends_us(const struct cl_peer *peer, const struct cl_receive *receive)
{
    const struct cl_receive_partial *partial = &receive->partial;
    if (receive->message.packet_count - receive->message.packets_arrived > receive->message.loss_budget)
        return UINT64_MAX;
    bool probed = partial->told_budget != 0;
    bool all_protected = partial->safe || (probed && partial->protected_arrived >= partial->protected_count);
    if ((partial->exhausted || probed) && all_protected)
        return partial->arrived_us + reordering_us(peer, receive);
    if (partial->deadline_us == UINT64_MAX || (partial->guarded && !all_protected))
        return UINT64_MAX;
    uint64_t stalled_us = partial->arrived_us + stall_us(peer);
    return stalled_us > partial->deadline_us ? stalled_us : partial->deadline_us;
}

static void schedule(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_receive *receive, uint64_t when_us)
{
    if (when_us == UINT64_MAX)
        return;
    if (!receive->partial.ending) {
        receive->partial.ending = true;
        cl_message_list_append(&peer->ending, &receive->message);
    }
    if (when_us < peer->ending_us) {
        peer->ending_us = when_us;
        cl_endpoint_arm(endpoint, peer, when_us);
    }
}

void cl_partial_begin_receive(struct cl_endpoint *endpoint, struct cl_receive *receive, const struct cl_qos *qos,
                              bool wary, uint64_t now_us)
{
    struct cl_receive_partial *partial = &receive->partial; /* a PROBE may have come before */
    receive->message.loss_budget = cl_partial_loss_budget(receive->message.packet_count, qos->loss_bound);
    if (partial->told_budget && partial->told_budget != receive->message.loss_budget) {
        cl_messages_mismatch(endpoint, receive);
        return;
    }
    if (!receive->message.loss_budget)
        return;
    partial->guarded = qos->protect != NULL || qos->protect_first || qos->protect_last;
    partial->wary = wary;
    partial->arrived_us = now_us;
    partial->deadline_us = qos->deadline_us ? now_us + qos->deadline_us : UINT64_MAX;
    schedule(endpoint, endpoint->peers.list[receive->message.peer], receive, partial->deadline_us);
}

void cl_partial_on_packet(struct cl_endpoint *endpoint, struct cl_receive *receive, uint8_t flags, bool placed,
                          uint64_t now_us)
{
    struct cl_receive_partial *partial = &receive->partial;
    if (!receive->message.loss_budget)
        return;
    struct cl_peer *peer = endpoint->peers.list[receive->message.peer];
    partial->protected_arrived += placed && !(flags & CL_PACKET_DROPPABLE);
    partial->safe |= (flags & CL_PACKET_SAFE) != 0;
    partial->exhausted |= (flags & CL_PACKET_TAIL) != 0;
    partial->arrived_us = now_us;
    if (partial->exhausted || partial->told_budget || now_us >= partial->deadline_us)
        schedule(endpoint, peer, receive, ends_us(peer, receive));
}

bool cl_partial_is_late(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                        uint32_t packet)
{
    const struct cl_stop *stop = peer->stops.first != NULL ? cl_stops_find(&peer->stops, id) : NULL;
    if (stop == NULL)
        return false;
    if (!cl_stop_counts(stop, packet)) {
        endpoint->stats.packets_late++;
        peer->reordering_us = 2 * peer->reordering_us + REORDER_MIN_US;
        if (peer->reordering_us > REORDER_MAX_US)
            peer->reordering_us = REORDER_MAX_US;
    }
    return true;
}

/* Takes a PROBE in for a message that is not in the table. */
static enum cl_probed on_probe_of_none(struct cl_endpoint *endpoint, struct cl_peer *peer,
                                       const struct cl_message_id *id)
{
    const struct cl_closed_group *closed = cl_closed_groups_find(&endpoint->closed, id->group);
    if (closed != NULL && closed->reason)
        cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_ABORT,
                          cl_control_abort(closed->group, closed->reason, closed->culprit));
    else if (closed == NULL && !cl_history_contains(&peer->history, id))
        return CL_PROBED_NOTHING;
    else if (cl_stops_find(&peer->stops, id) == NULL)
        tell_stop(endpoint, peer, id, 0); /* the message was complete before the PROBE came */
    return CL_PROBED;
}

enum cl_probed cl_partial_on_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                                   const uint8_t *payload, uint64_t now_us)
{
    if (packet->length != CL_PROBE_BYTES || !cl_load_u32(payload + 4))
        return CL_PROBED_MALFORMED;
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_receive *receive = cl_table_find_receive(&endpoint->table, peer->id, &id);
    if (receive == NULL)
        return on_probe_of_none(endpoint, peer, &id);
    struct cl_receive_partial *partial = &receive->partial;
    partial->protected_count = cl_load_u32(payload);
    partial->told_budget = cl_load_u32(payload + 4);
    if (receive->message.posted && partial->told_budget != receive->message.loss_budget) {
        cl_messages_mismatch(endpoint, receive);
    } else if (receive->message.posted) {
        partial->arrived_us = now_us;
        schedule(endpoint, peer, receive, ends_us(peer, receive));
    }
    return CL_PROBED;
}

void cl_partial_complete(struct cl_endpoint *endpoint, const struct cl_receive *receive)
{
    if (receive->partial.told_budget)
        tell_stop(endpoint, endpoint->peers.list[receive->message.peer], &receive->message.id, 0);
}

static bool stop(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_receive *receive)
{
    uint32_t part = cl_stop_part(peer->payload_bytes);
    if (cl_stops_add(&peer->stops, &receive->message, part) == NULL)
        return false;
    for (uint32_t first = 0; first < receive->message.packet_count; first += part)
        tell_stop(endpoint, peer, &receive->message.id, first);
    endpoint->stats.messages_stopped++;
    peer->reordering_us -= peer->reordering_us / 64;
    cl_history_add(&peer->history, &receive->message.id);
    cl_messages_complete(endpoint, &receive->message, CL_OK);
    return true;
}

void cl_partial_service(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us)
{
    uint64_t next_us = UINT64_MAX;
    for (struct cl_message *message = peer->ending.first, *next; message != NULL; message = next) {
        next = message->next;
        struct cl_receive *receive = cl_message_as_receive(message);
        uint64_t when_us = ends_us(peer, receive);
        if (when_us <= now_us) {
            if (stop(endpoint, peer, receive))
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
    struct cl_message_id id = cl_control_id(control);
    if (kind == CL_PACKET_STOP) {
        const struct cl_stop *record = cl_stops_find(&peer->stops, &id);
        if (record == NULL)
            return 0;
        cl_stop_write(record, control->first_packet, payload);
        return (int)cl_stop_bytes(record->packet_count, record->part, control->first_packet);
    }
    if (kind != CL_PACKET_PROBE)
        return 0;
    const struct cl_send *send = cl_table_find_send(&endpoint->table, peer->id, &id);
    if (send == NULL || !send->partial.has_run_out)
        return -1;
    cl_store_u32(payload, send->partial.protected_count);
    cl_store_u32(payload + 4, send->message.loss_budget);
    return CL_PROBE_BYTES;
}
