#include "protocol/outbound.h"

#include <string.h>

#include "protocol/endpoint_state.h"
#include "protocol/messages.h"
#include "protocol/packet.h"
#include "protocol/partial.h"
#include "protocol/spray.h"

enum {
    PEERS_COMPARED = 32, /* most peers compared for each packet */
    TURN_US = 50,        /* the longest turn of more than CL_QUEUE_TURN packets: other peers wait for its end */
    TURN_MOST_US = 200,  /* the same where the caller comes seldom: see turn_limit */
    TURNS_PER_PAUSE = 2, /* of turns longer than TURN_US */
    TURN_BYTES = 64000,  /* and what fits into one super-packet */
    FRAGMENT_BYTES = CL_PACKET_HEAD_BYTES + CL_CONGESTION_OVERHEAD_BYTES,
};

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Writes the header of `packet` into `out` and seals it. number: 64 bits, of the packet or acknowledgement. */
static void write_datagram(struct cl_endpoint *endpoint, const struct cl_peer *peer, struct cl_packet *packet,
                           uint64_t number, struct cl_datagram *out)
{
    packet->source = endpoint->config.self;
    packet->epoch = cl_endpoint_epoch(endpoint, peer);
    out->peer = peer->id;
    out->path = packet->path;
    out->port = (uint16_t)(peer->paths[packet->path].port - endpoint->outbox.ports);
    out->priority = packet->flags & CL_PACKET_PRIORITY;
    out->droppable = false;
    out->message = NULL;
    cl_packet_encode(packet, out->head);
    const uint8_t *payload = out->payload_length ? out->payload : out->head + CL_PACKET_HEAD_BYTES;
    cl_packet_seal(out->head, payload, cl_endpoint_seal(endpoint, peer), peer->id, number);
    endpoint->stats.packets_sent++;
}

static void send_ack(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us,
                     struct cl_datagram *out)
{
    struct cl_packet packet = {.kind = CL_PACKET_ACK, .path = path->index};
    uint64_t number = path->ack.written;
    cl_ack_write(&path->ack, &packet, out->head + CL_PACKET_HEAD_BYTES, now_us);
    struct cl_congestion_port port = {0}; /* credit keeps the port's queue short, and shares it */
    if (endpoint->budget.bytes == 0)
        port = cl_congestion_nic_port(&path->nic->congestion, now_us);
    cl_ack_write_port(out->head + CL_PACKET_HEAD_BYTES, port.rate, port.senders);
    out->head_length = (uint16_t)(CL_PACKET_HEAD_BYTES + packet.length);
    cl_congestion_sent_control(&path->congestion, out->head_length);
    out->payload_length = 0;
    out->payload = NULL;
    write_datagram(endpoint, peer, &packet, number, out);
    endpoint->stats.acks_sent++;
}

/* Sends a PING or a control packet, padded. False when there is no memory, or the packet is not needed any more. */
static bool send_padded(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint8_t kind,
                        const struct cl_control *control, uint32_t padding, uint64_t now_us, struct cl_datagram *out)
{
    static const uint8_t ZEROS[CL_ENDPOINT_DATAGRAM_BYTES_MAX];
    int written = cl_partial_write(endpoint, peer, kind, control, out->head + CL_PACKET_HEAD_BYTES);
    if (written < 0)
        return false;
    uint32_t length = (uint32_t)written + padding;
    struct cl_packet packet = {
        .kind = kind,
        .flags = kind == CL_PACKET_GRANT ? 0 : CL_PACKET_ACK_NOW, /* grants are many, and data answers them */
        .length = (uint16_t)length,
        .path = path->index,
        .signature = kind == CL_PACKET_PING || kind == CL_PACKET_REQUEST
                         ? cl_signatures_find(&endpoint->signatures, control->group, control->sequence)
                         : 0,
        .number = (uint32_t)path->sent.next};
    cl_control_write(control, &packet);
    struct cl_sent_packet sent = {.sent_us = now_us,
                                  .congestion = cl_congestion_remember(&path->congestion, 0, now_us),
                                  .control = *control,
                                  .bytes = (uint16_t)(CL_PACKET_HEAD_BYTES + length),
                                  .datagram_bytes = (uint16_t)(CL_PACKET_HEAD_BYTES + length),
                                  .kind = kind};
    if (!cl_sent_push(&path->sent, &sent))
        return false;
    cl_congestion_sent_control(&path->congestion, sent.bytes);
    out->head_length = (uint16_t)(sent.bytes - padding);
    out->payload_length = padding;
    out->payload = padding ? ZEROS : NULL;
    write_datagram(endpoint, peer, &packet, path->sent.next - 1, out);
    endpoint->stats.probes_sent += kind == CL_PACKET_PING;
    endpoint->stats.grants_sent += kind == CL_PACKET_GRANT;
    return true;
}

static bool send_control(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint8_t kind,
                         const struct cl_control *control, uint64_t now_us, struct cl_datagram *out)
{
    return send_padded(endpoint, peer, path, kind, control, 0, now_us, out);
}

/* Replaces the datagram by its fragments. */
static void split(struct cl_endpoint *endpoint, const struct cl_peer *peer, const struct cl_path *path,
                  struct cl_datagram *out, size_t count)
{
    struct cl_datagram whole = *out;
    uint32_t length = whole.head_length + whole.payload_length, at = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t end = cl_fragments_end(length, path->mtu.limit, at);
        struct cl_packet packet = {.kind = CL_PACKET_FRAGMENT,
                                   .flags = whole.priority,
                                   .length = (uint16_t)(end - at),
                                   .path = path->index,
                                   .index = length,
                                   .offset = at,
                                   .number = (uint32_t)(path->sent.next - 1)};
        out[i].head_length = CL_PACKET_HEAD_BYTES;
        out[i].payload_length = 0;
        if (i == 0) {
            memcpy(out->head + CL_PACKET_HEAD_BYTES, whole.head, whole.head_length);
            memcpy(out->head + CL_PACKET_HEAD_BYTES + whole.head_length, whole.payload, end - whole.head_length);
            out->head_length = (uint16_t)(CL_PACKET_HEAD_BYTES + end);
        } else {
            out[i].payload_length = end - at;
            out[i].payload = whole.payload + (at - whole.head_length);
        }
        write_datagram(endpoint, peer, &packet, path->sent.next - 1, &out[i]);
        out[i].droppable = whole.droppable;
        out[i].message = whole.message;
        out[i].generation = whole.generation;
        at = end;
    }
    endpoint->stats.packets_sent -= count; /* the whole is counted already */
}

/* How many datagrams a packet of the message may take on the path. */
static size_t datagrams_of(const struct cl_send *send, const struct cl_path *path)
{
    return cl_fragments_count(CL_PACKET_HEAD_BYTES + send->message.packet_bytes, path->mtu.limit);
}

/* Sends one packet of a message. Returns the number of its datagrams; 0: there is no memory. */
static size_t send_data(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, struct cl_send *send,
                        uint32_t number_in_message, bool again, bool ask, uint64_t now_us, struct cl_datagram *out)
{
    struct cl_message *message = &send->message;
    uint32_t start = number_in_message * message->packet_bytes;
    bool last = number_in_message + 1 == message->packet_count;
    uint32_t length = last ? message->length - start : message->packet_bytes, bytes = CL_PACKET_HEAD_BYTES + length;
    size_t count = cl_fragments_count(bytes, path->mtu.limit);
    struct cl_sent_packet sent = {
        .sent_us = now_us,
        .congestion = cl_congestion_remember(&path->congestion, send->priority, now_us),
        .data = {.send = send, .generation = message->generation, .packet = number_in_message},
        .bytes = (uint16_t)smaller(UINT16_MAX, bytes + (uint32_t)(count - 1) * FRAGMENT_BYTES),
        .datagram_bytes = (uint16_t)smaller(bytes, path->mtu.limit),
        .kind = CL_PACKET_DATA,
        .class = send->priority,
        .again = again};
    struct cl_packet packet = {.kind = CL_PACKET_DATA,
                               .flags = (uint8_t)(cl_class_within_host(send->priority) | (last ? CL_PACKET_LAST : 0) |
                                                  cl_partial_flags(send, number_in_message)),
                               .length = (uint16_t)length,
                               .path = path->index,
                               .signature = message->signature,
                               .group = message->id.group,
                               .sequence = message->id.sequence,
                               .index = message->id.index,
                               .offset = number_in_message * peer->payload_bytes,
                               .number = (uint32_t)path->sent.next};
    if (cl_path_asks(path, send->priority, sent.bytes + endpoint->config.datagram_bytes) || ask)
        packet.flags |= CL_PACKET_ACK_NOW;
    if (!cl_sent_push(&path->sent, &sent))
        return 0;
    cl_congestion_sent(&path->congestion, send->priority, cl_queue_first_class(&endpoint->queue), sent.bytes, now_us);
    send->packets_in_flight++;
    if (!message->first_us)
        message->first_us = now_us;
    out->head_length = CL_PACKET_HEAD_BYTES;
    out->payload_length = length;
    out->payload = send->data + start;
    write_datagram(endpoint, peer, &packet, path->sent.next - 1, out);
    out->droppable = packet.flags & CL_PACKET_DROPPABLE;
    out->message = message;
    out->generation = message->generation;
    endpoint->stats.payload_bytes_sent += length;
    if (count > 1)
        split(endpoint, peer, path, out, count);
    return count;
}

/* Counts a packet of the message that is sent again. If some were refused and some lost, the refused ones count first.
 */
static void count_again(struct cl_engine_stats *stats, struct cl_send *send)
{
    stats->packets_retransmitted++;
    if (send->refused > 0) {
        stats->retransmitted_refused++;
        send->refused--;
    } else if (send->repeated > 0) {
        stats->retransmitted_early++;
        send->repeated--;
    } else {
        stats->retransmitted_lost++;
    }
}

/* Sends the probe of a PTO, whatever the window says: the oldest packet in flight again, as it may be the missing one;
 * a PING when no packet in flight is needed any more. */
static size_t send_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us,
                         struct cl_datagram *out, size_t capacity)
{
    static const struct cl_control NOTHING = {0};
    for (uint64_t number = path->sent.low; number < path->sent.next; number++) {
        const struct cl_sent_packet *oldest = cl_sent_find(&path->sent, number);
        if (oldest == NULL || oldest->kind == CL_PACKET_PING)
            continue;
        if (oldest->kind != CL_PACKET_DATA) {
            struct cl_control control = oldest->control;
            if (send_control(endpoint, peer, path, oldest->kind, &control, now_us, out))
                return 1;
            continue;
        }
        struct cl_send *send = oldest->data.send;
        if (send->message.generation != oldest->data.generation || send->held || send->partial.stopped ||
            cl_message_has_arrived(&send->message, oldest->data.packet))
            continue;
        if (datagrams_of(send, path) > capacity)
            break;
        endpoint->stats.packets_retransmitted++;
        endpoint->stats.retransmitted_probes++;
        size_t count = send_data(endpoint, peer, path, send, oldest->data.packet, true, true, now_us, out);
        for (size_t i = 0; i < count; i++)
            out[i].droppable = false;
        return count;
    }
    path->sent.last_sent_us = now_us; /* a PING alone would leave the timer where it is */
    return send_control(endpoint, peer, path, CL_PACKET_PING, &NOTHING, now_us, out);
}

/* Whether a probe has to wait for the interface. Probes may repeat packets that are merely late. With hundreds of peers
 * behind a slow interface, probes alone could fill it and delay the packets that prove that this process lives. So they
 * wait for the interface's pacer like data. */
static bool wait_for_interface(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path,
                               uint64_t now_us)
{
    uint64_t ready_us = cl_congestion_nic_ready_us(&path->nic->congestion, CL_CLASSES_BETWEEN_HOSTS - 1, now_us);
    if (ready_us <= now_us)
        return false;
    cl_peer_list_wait(&endpoint->peers, peer);
    path->probe_waits = true;
    cl_timers_arm(&endpoint->timers, &endpoint->nics.timer, ready_us);
    return true;
}

/* Sends everything that goes before data: acknowledgements, PINGs, probes and control packets; to a lost peer, control
 * packets only. Packets of full ports wait until the port is released. Returns the number of datagrams; if it is
 * `capacity`, more may be left. */
static size_t send_before_data(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us,
                               struct cl_datagram *out, size_t capacity)
{
    size_t count = 0;
    for (uint16_t i = 0; i < peer->path_count && peer->alive; i++) {
        struct cl_path *path = &peer->paths[i];
        if (cl_path_is_full(path))
            continue;
        if (path->ack.deadline_us <= now_us && count < capacity)
            send_ack(endpoint, peer, path, now_us, &out[count++]);
        if (path->ping && count < capacity) {
            path->ping = false;
            /* Unanswered PINGs must not pile up; but round trips may be longer than the time between two PINGs. */
            if (path->sent.packets == path->sent.pings && path->sent.pings >= CL_PATH_PINGS_MAX)
                cl_sent_remove(&path->sent, path->sent.low);
            struct cl_signature call = cl_signatures_next(&endpoint->signatures);
            struct cl_control control = {.group = call.group, .sequence = call.sequence};
            count += send_control(endpoint, peer, path, CL_PACKET_PING, &control, now_us, &out[count]);
        }
        if (path->probe && count < capacity && !wait_for_interface(endpoint, peer, path, now_us)) {
            path->probe = false;
            count += send_probe(endpoint, peer, path, now_us, &out[count], capacity - count);
        }
        if (path->padded_ping && count < capacity) {
            static const struct cl_control NOTHING = {0};
            uint32_t padding = path->padded_ping - CL_PACKET_HEAD_BYTES;
            path->padded_ping = 0;
            count += send_padded(endpoint, peer, path, CL_PACKET_PING, &NOTHING, padding, now_us, &out[count]);
        }
    }
    struct cl_path *fastest = cl_spray_fastest(peer->paths, peer->path_count);
    struct cl_control_entry entry;
    while (fastest != NULL && count < capacity && cl_controls_pop(&peer->controls, &entry))
        count += send_control(endpoint, peer, fastest, entry.kind, &entry.control, now_us, &out[count]);
    cl_endpoint_arm(endpoint, peer, cl_peer_deadline_us(peer));
    return count;
}

static size_t send_all_before_data(struct cl_endpoint *endpoint, uint64_t now_us, struct cl_datagram *out,
                                   size_t capacity)
{
    size_t count = 0;
    while (endpoint->peers.urgent_first != NULL && count < capacity) {
        struct cl_peer *peer = endpoint->peers.urgent_first;
        count += send_before_data(endpoint, peer, now_us, out + count, capacity - count);
        if (count == capacity)
            break; /* more may be left: the peer stays first */
        cl_peer_list_calm(&endpoint->peers);
    }
    return count;
}

/* Whether no packet of the message may be sent now: see cl_peer_wary. */
static bool must_wait(const struct cl_peer *peer, const struct cl_send *send)
{
    return send->packets_in_flight && cl_peer_wary(peer, send);
}

/* The bytes that the peer got through an interface. A peer that did not want any for a while cannot claim the bytes
 * that others got meanwhile: it counts as level with the last of them. */
static uint64_t turn_of(const struct cl_endpoint *endpoint, const struct cl_peer *peer, const struct cl_nic *nic)
{
    uint64_t turn = peer->turns[nic - endpoint->nics.list];
    return turn > nic->turn ? turn : nic->turn;
}

/* The packets of a turn that leaves through an interface. A caller that comes seldom hands over the packets of its
 * whole pause at once. Long turns cost its core less, and keep other peers waiting for no more than half of such a
 * pause. */
static uint32_t turn_limit(const struct cl_endpoint *endpoint, const struct cl_nic *nic, uint64_t now_us)
{
    uint64_t turn_us = endpoint->pause_us / TURNS_PER_PAUSE;
    if (turn_us < TURN_US || cl_congestion_nic_has_urgent(&nic->congestion, now_us))
        turn_us = TURN_US;
    else if (turn_us > TURN_MOST_US)
        turn_us = TURN_MOST_US;
    uint64_t bytes = cl_congestion_nic_rate(&nic->congestion) * turn_us / 1000000;
    uint64_t batch = cl_congestion_nic_batch(&nic->congestion, now_us);
    bytes = bytes > batch ? bytes : batch;
    bytes = bytes < TURN_BYTES ? bytes : TURN_BYTES;
    return smaller(CL_QUEUE_TURN_MOST, (uint32_t)bytes / endpoint->config.datagram_bytes);
}

/* Balances the peers on each of several interfaces. Chance decides which interface is free when a peer has its turn, so
 * several hosts may send to one port of a peer while its other ports are idle. So each interface sends the same amount
 * to each waiting peer, give or take half a turn: if the peer of `send`, which would leave by `*path`, is further
 * ahead there, the peer that lags most gets the turn. Returns its message, and its path in `*path`. */
static struct cl_send *balance(struct cl_endpoint *endpoint, struct cl_send *send, const struct cl_spray_packet *wanted,
                               struct cl_path **path, uint64_t now_us)
{
    struct cl_nic *nic = (*path)->nic;
    struct cl_peer *first = endpoint->peers.list[send->message.peer];
    struct cl_send *lagging = send;
    struct cl_path *lagging_path = *path;
    uint64_t own = turn_of(endpoint, first, nic), least = own;
    struct cl_queue_node *node = first->node.classes[send->priority].next;
    for (int i = 0; i < PEERS_COMPARED && node != &first->node; i++, node = node->classes[send->priority].next) {
        struct cl_send *other = cl_message_as_send(node->classes[send->priority].sends.first);
        struct cl_peer *peer = endpoint->peers.list[other->message.peer];
        if (turn_of(endpoint, peer, nic) >= least || must_wait(peer, other) || cl_send_is_older(send, other))
            continue;
        struct cl_path *open = cl_spray_through(peer->paths, peer->path_count, nic, wanted, now_us);
        if (open == NULL)
            continue;
        least = turn_of(endpoint, peer, nic);
        lagging = other;
        lagging_path = open;
    }
    nic->turn = least;
    if (own <= least + (uint64_t)cl_queue_turn_limit(&endpoint->queue) / 2 * endpoint->config.datagram_bytes)
        return send;
    *path = lagging_path;
    return lagging;
}

/* Sends one packet of the message whose turn it is. Returns the number of its datagrams. 0: it cannot send now; then it
 * has left the queue, its peer is blocked, it ended without memory, or (*crowded) its datagrams exceed the capacity. */
static size_t send_next(struct cl_endpoint *endpoint, struct cl_send *send, uint64_t now_us, struct cl_datagram *out,
                        size_t capacity, bool *crowded)
{
    struct cl_peer *peer = endpoint->peers.list[send->message.peer];
    if (must_wait(peer, send)) {
        cl_queue_remove(&endpoint->queue, &peer->node, send);
        return 0;
    }
    uint64_t ready_us, egress_ready_us;
    struct cl_spray_packet wanted = {.bytes = endpoint->config.datagram_bytes,
                                     .class = send->priority,
                                     .first_class = cl_queue_first_class(&endpoint->queue)};
    /* a turn leaves by one path if possible: the wire sends consecutive packets of one path much faster */
    struct cl_path *path = &peer->paths[peer->turn_path];
    bool begins = cl_queue_turn_begins(&endpoint->queue), same = !begins && cl_spray_may(path, &wanted, now_us);
    if (!same)
        path = cl_spray_pick(peer->paths, peer->path_count, &wanted, now_us, &ready_us, &egress_ready_us);
    if (path == NULL) {
        cl_queue_block(&endpoint->queue, &peer->node, send->priority);
        peer->pacer_us = ready_us;
        cl_endpoint_arm(endpoint, peer, ready_us);
        if (egress_ready_us != UINT64_MAX)
            cl_peer_list_wait(&endpoint->peers, peer);
        cl_timers_arm(&endpoint->timers, &endpoint->nics.timer, egress_ready_us);
        return 0;
    }
    if (begins)
        endpoint->queue.turn_limit = turn_limit(endpoint, path->nic, now_us);
    if (!same && endpoint->nics.count > 1) {
        struct cl_send *lagging = balance(endpoint, send, &wanted, &path, now_us);
        if (lagging != send) {
            send = lagging;
            peer = endpoint->peers.list[send->message.peer];
            cl_queue_give_turn(&endpoint->queue, &peer->node, send->priority);
        }
    }
    if (datagrams_of(send, path) > capacity) {
        *crowded = true;
        return 0;
    }
    peer->turn_path = path->index;
    uint32_t fresh = send->next_packet, packet;
    if (!cl_send_take(send, &packet)) {
        cl_queue_remove(&endpoint->queue, &peer->node, send);
        return 0;
    }
    bool more = cl_send_sendable(send);
    size_t sent = send_data(endpoint, peer, path, send, packet, packet < fresh, !more, now_us, out);
    if (!sent) {
        cl_messages_complete(endpoint, &send->message, CL_ENOMEM);
        return 0;
    }
    if (packet < fresh)
        count_again(&endpoint->stats, send);
    if (!send->lost.count)
        send->refused = send->repeated = 0;
    peer->turns[path->nic - endpoint->nics.list] = turn_of(endpoint, peer, path->nic) + send->message.packet_bytes;
    for (size_t i = 0; i < sent; i++) /* a packet that is sent again exceeds the loss budget */
        out[i].droppable = out[i].droppable && packet >= fresh;
    if (path->sent.packets - path->sent.pings == 1)
        cl_endpoint_arm(endpoint, peer, cl_loss_pto_us(&path->loss, &path->sent, &path->rtt));
    cl_queue_sent(&endpoint->queue, &peer->node, send, out->payload_length < send->message.packet_bytes);
    if (!more) {
        cl_queue_remove(&endpoint->queue, &peer->node, send);
        cl_partial_run_out(endpoint, send);
        cl_endpoint_arm(endpoint, peer, cl_path_repeat_us(path));
    }
    return sent;
}

/* ---- full ports ---- */

void cl_endpoint_refuse(struct cl_endpoint *endpoint, const struct cl_datagram *datagram)
{
    cl_outbox_keep(&endpoint->outbox, datagram); /* without memory it is lost like any other */
}

void cl_endpoint_release_port(struct cl_endpoint *endpoint, uint32_t port)
{
    if (port >= CL_OUTBOX_PORTS || !endpoint->outbox.ports[port].full)
        return;
    cl_outbox_release(&endpoint->outbox, port);
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        struct cl_peer *peer = endpoint->peers.list[i];
        for (uint16_t j = 0; peer != NULL && j < peer->path_count; j++)
            if (peer->paths[j].port == &endpoint->outbox.ports[port]) {
                cl_queue_unblock(&endpoint->queue, &peer->node);
                cl_peer_list_urge(&endpoint->peers, peer);
            }
    }
}

uint64_t cl_endpoint_full_ports(const struct cl_endpoint *endpoint)
{
    return endpoint->outbox.full;
}

/* Whether a datagram that a full port refused is still worth sending. A packet of a message that has ended never leaves
 * and is not lost: nobody waits for it. */
static bool is_wanted(struct cl_endpoint *endpoint, const struct cl_datagram *datagram)
{
    struct cl_peer *peer = endpoint->peers.list[datagram->peer];
    struct cl_path *path = &peer->paths[datagram->path];
    struct cl_packet packet;
    if (!cl_packet_decode(&packet, datagram->head, (size_t)datagram->head_length + datagram->payload_length) ||
        packet.epoch != cl_endpoint_epoch(endpoint, peer)) /* of a former incarnation */
        return false;
    if (packet.kind == CL_PACKET_ACK)
        return true;
    uint64_t number = cl_packet_number(path->sent.next, packet.number);
    if (cl_sent_find(&path->sent, number) == NULL)
        return false;
    if (datagram->message == NULL || datagram->message->generation == datagram->generation)
        return true;
    cl_sent_remove(&path->sent, number);
    return false;
}

/* Hands out what full ports have refused and may take now. */
static size_t send_refused(struct cl_endpoint *endpoint, struct cl_datagram *out, size_t capacity)
{
    size_t count = 0;
    const struct cl_datagram *next;
    while (count < capacity && (next = cl_outbox_take(&endpoint->outbox, count ? capacity - count : SIZE_MAX)) != NULL)
        if (is_wanted(endpoint, next))
            out[count++] = *next;
    return count;
}

bool cl_endpoint_has_urgent(const struct cl_endpoint *endpoint, uint64_t now_us)
{
    return cl_nics_have_urgent(&endpoint->nics, now_us);
}

/* Measures the time between two turns of the caller, each of which may ask for packets several times. It counts only in
 * the middle of much data: a caller that had nothing to send does not come seldom. */
static void see_pause(struct cl_endpoint *endpoint, uint64_t now_us)
{
    if (now_us == endpoint->asked_us)
        return;
    endpoint->pause_us = endpoint->handed_out > CL_QUEUE_TURN ? now_us - endpoint->asked_us : 0;
    endpoint->asked_us = now_us;
    endpoint->handed_out = 0;
}

size_t cl_endpoint_send(struct cl_endpoint *endpoint, uint64_t now_us, struct cl_datagram *out, size_t capacity)
{
    endpoint->awake_us = now_us;
    see_pause(endpoint, now_us);
    size_t count = send_refused(endpoint, out, capacity);
    count += send_all_before_data(endpoint, now_us, out + count, capacity - count);
    while (count < capacity) {
        struct cl_send *send = cl_queue_next(&endpoint->queue);
        if (send == NULL)
            break;
        if (count && cl_queue_turn_begins(&endpoint->queue) && capacity - count < CL_QUEUE_TURN_MOST)
            break; /* the turn would leave in two parts */
        /* mostly the interface is busy: this saves asking every peer in turn */
        uint64_t ready_us = cl_nics_ready_us(&endpoint->nics, cl_queue_first_class(&endpoint->queue), now_us);
        if (ready_us > now_us) {
            cl_timers_arm(&endpoint->timers, &endpoint->nics.timer, ready_us);
            break;
        }
        bool crowded = false;
        size_t sent = send_next(endpoint, send, now_us, &out[count], capacity - count, &crowded);
        count += sent;
        endpoint->handed_out += sent;
        if (crowded)
            break;
    }
    return count;
}
