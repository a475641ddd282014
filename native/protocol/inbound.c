#include "protocol/inbound.h"

#include "protocol/credit.h"
#include "protocol/ending.h"
#include "protocol/messages.h"
#include "protocol/outcome.h"
#include "protocol/packet.h"
#include "protocol/partial.h"
#include "protocol/placement.h"

enum answer { ACCEPT, ACCEPT_AT_ONCE, REFUSE, FOREIGN };

/* Whether a receive from any source may take this message: its tag is wanted, and it is the next of its peer. */
static bool is_next_wanted(const struct cl_endpoint *endpoint, const struct cl_peer *peer,
                           const struct cl_message_id *id)
{
    return cl_announcements_wants(&endpoint->announcements, id->group, id->sequence) &&
           id->index == cl_history_next_index(&peer->history, id->group, id->sequence);
}

/* A receive that is not posted yet; NULL: no memory. */
static struct cl_receive *add_unposted(struct cl_endpoint *endpoint, struct cl_peer *peer,
                                       const struct cl_message_id *id)
{
    struct cl_receive *receive = cl_table_add_receive(&endpoint->table, peer->id, id);
    if (receive != NULL && id->group & CL_GROUP_P2P)
        cl_announcements_add(&endpoint->announcements, receive);
    else if (receive != NULL && !cl_index_add(&endpoint->unposted, &receive->message.operation,
                                              cl_index_operation(id->group, id->sequence))) {
        cl_messages_discard(endpoint, &receive->message);
        receive = NULL;
    }
    return receive;
}

static enum answer keep(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_receive *receive,
                        const struct cl_message_id *id, const struct cl_packet *packet, const uint8_t *payload,
                        uint64_t now_us)
{
    if (receive == NULL)
        receive = add_unposted(endpoint, peer, id);
    if (receive != NULL && cl_unexpected_put(&endpoint->unexpected, &receive->unexpected, packet->offset, packet->flags,
                                             payload, packet->length)) {
        endpoint->stats.packets_unexpected++;
        receive->message.signature = packet->signature;
        return ACCEPT;
    }
    if (receive != NULL && receive->unexpected.first == NULL && !receive->credit.requested &&
        !is_next_wanted(endpoint, peer, id))
        cl_messages_discard(endpoint, &receive->message);
    endpoint->stats.packets_unexpected_dropped++;
    peer->refused_us = now_us ? now_us : 1;
    return REFUSE;
}

static enum answer on_data(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                           const uint8_t *payload, uint64_t now_us)
{
    /* Packets of encoded values may be shorter than others: only placement knows of which message they are. */
    if (packet->offset % peer->payload_bytes || packet->length > peer->payload_bytes ||
        (!packet->length && (packet->offset || !(packet->flags & CL_PACKET_LAST))))
        return FOREIGN;
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_receive *receive = cl_table_find_receive(&endpoint->table, peer->id, &id);
    if (receive != NULL && receive->message.posted) {
        if (cl_signatures_differ(receive->message.signature, packet->signature)) {
            cl_endpoint_fail_group(endpoint, packet->group, CL_EMISMATCH, peer->id);
            return REFUSE;
        }
        uint32_t generation = receive->message.generation;
        switch (cl_placement_put(endpoint, receive, packet->flags, packet->offset, payload, packet->length, now_us)) {
        case CL_PLACED:
            /* The message is complete. The sender waits for the acknowledgement, unless it has more to send. */
            return receive->message.generation != generation && !peer->expected ? ACCEPT_AT_ONCE : ACCEPT;
        case CL_PLACED_BEFORE:
            endpoint->stats.packets_duplicate++;
            return ACCEPT_AT_ONCE;
        case CL_PLACED_NOWHERE:
            return REFUSE;
        }
    }
    const struct cl_closed_group *closed = cl_closed_groups_find(&endpoint->closed, packet->group & ~CL_GROUP_P2P);
    if (closed != NULL && closed->reason) {
        cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_ABORT,
                          cl_control_abort(closed->group, closed->reason, closed->culprit));
        return REFUSE;
    }
    /* A closed group counts, too: its receives may have ended without packets, and their STOPs be on their way. */
    if (cl_partial_is_late(endpoint, peer, &id, packet->offset / peer->payload_bytes))
        return REFUSE; /* an acknowledgement would tell the sender that it counts */
    if (closed != NULL || cl_history_contains(&peer->history, &id)) {
        endpoint->stats.packets_duplicate++;
        return ACCEPT_AT_ONCE;
    }
    if (cl_signatures_differ(cl_signatures_find(&endpoint->signatures, id.group, id.sequence), packet->signature)) {
        cl_endpoint_fail_group(endpoint, packet->group, CL_EMISMATCH, peer->id);
        return REFUSE;
    }
    return keep(endpoint, peer, receive, &id, packet, payload, now_us);
}

static enum answer on_request(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                              uint64_t now_us)
{
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_receive *receive = cl_table_find_receive(&endpoint->table, peer->id, &id);
    const struct cl_closed_group *closed = cl_closed_groups_find(&endpoint->closed, packet->group);
    if (packet->group & CL_GROUP_P2P || endpoint->budget.bytes == 0)
        return FOREIGN; /* no peer with the same settings asks */
    if (closed != NULL && closed->reason) {
        cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_ABORT,
                          cl_control_abort(closed->group, closed->reason, closed->culprit));
        return ACCEPT;
    }
    if (receive == NULL && (closed != NULL || cl_history_contains(&peer->history, &id)))
        return ACCEPT; /* it has ended without its packets */
    if (cl_signatures_differ(cl_signatures_find(&endpoint->signatures, id.group, id.sequence), packet->signature)) {
        cl_endpoint_fail_group(endpoint, packet->group, CL_EMISMATCH, peer->id);
        return ACCEPT;
    }
    if (receive == NULL && (receive = add_unposted(endpoint, peer, &id)) == NULL)
        return REFUSE;
    if (!receive->message.posted)
        receive->message.signature = packet->signature;
    cl_credit_on_request(endpoint, receive, packet->offset, now_us);
    return ACCEPT;
}

static void on_grant(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet)
{
    struct cl_send *send = cl_credit_on_grant(endpoint, peer, packet);
    if (send != NULL)
        cl_messages_requeue(endpoint, send, false);
}

static void on_ready(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                     uint64_t now_us)
{
    cl_peer_note_ready(peer, packet->group, packet->sequence, now_us);
    uint64_t operation = cl_index_operation(packet->group, packet->sequence);
    for (struct cl_index_place *place; (place = cl_index_find(&peer->held_operations, operation)) != NULL;) {
        struct cl_send *send = cl_message_as_send(CL_INDEX_THING(place, struct cl_message, operation));
        cl_peer_unhold(peer, send);
        send->accepted = true; /* there is room: no single packet first, see cl_peer_wary */
        cl_messages_requeue(endpoint, send, false);
    }
}

static void on_abort(struct cl_endpoint *endpoint, const struct cl_packet *packet)
{
    struct cl_control abort = cl_control_read(packet);
    cl_endpoint_fail_group(endpoint, abort.group, abort.reason, abort.culprit);
}

static void on_mismatch(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet)
{
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_send *send = cl_table_find_send(&endpoint->table, peer->id, &id);
    if (send != NULL)
        cl_messages_complete(endpoint, &send->message, CL_EMISMATCH);
}

static bool on_ack(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path,
                   const struct cl_packet *packet, const uint8_t *payload, uint64_t received_us, uint64_t now_us)
{
    struct cl_outcome outcome = {endpoint, peer, now_us};
    struct cl_path_callbacks callbacks = cl_outcome_callbacks(&outcome);
    if (!cl_path_on_ack(path, packet, payload, received_us, now_us, &callbacks))
        return false;
    endpoint->stats.acks_received++;
    cl_credit_measured(endpoint, &path->rtt);
    cl_queue_unblock(&endpoint->queue, &peer->node);
    cl_endpoint_arm(endpoint, peer, cl_path_deadline_us(path));
    return true;
}

static enum answer on_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                            const uint8_t *payload, uint64_t now_us)
{
    static const enum answer ANSWERS[] = {
        [CL_PROBED] = ACCEPT_AT_ONCE, [CL_PROBED_NOTHING] = REFUSE, [CL_PROBED_MALFORMED] = FOREIGN};
    return ANSWERS[cl_partial_on_probe(endpoint, peer, packet, payload, now_us)];
}

static enum answer on_packet(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                             const uint8_t *payload, uint64_t now_us)
{
    switch (packet->kind) {
    case CL_PACKET_DATA:
        return on_data(endpoint, peer, packet, payload, now_us);
    case CL_PACKET_PING:
        if (cl_signatures_differ(cl_signatures_find(&endpoint->signatures, packet->group, packet->sequence),
                                 packet->signature))
            cl_endpoint_fail_group(endpoint, packet->group, CL_EMISMATCH, peer->id);
        break;
    case CL_PACKET_READY:
        on_ready(endpoint, peer, packet, now_us);
        break;
    case CL_PACKET_ABORT:
        on_abort(endpoint, packet);
        break;
    case CL_PACKET_MISMATCH:
        on_mismatch(endpoint, peer, packet);
        break;
    case CL_PACKET_PROBE:
        return on_probe(endpoint, peer, packet, payload, now_us);
    case CL_PACKET_REQUEST:
        return on_request(endpoint, peer, packet, now_us);
    case CL_PACKET_GRANT:
        on_grant(endpoint, peer, packet);
        return ACCEPT;
    case CL_PACKET_STOP:
        return cl_partial_on_stop(endpoint, peer, packet, payload) ? ACCEPT_AT_ONCE : FOREIGN;
    default:
        break;
    }
    return ACCEPT_AT_ONCE;
}

/* Takes a fragment in. Returns the whole packet, of cl_packet_whole_length bytes, once it is complete; else NULL. The
 * whole has a tag of its own and is checked like any other packet. */
static const struct cl_whole *on_fragment(struct cl_endpoint *endpoint, const struct cl_peer *peer,
                                          struct cl_path *path, const struct cl_packet *packet, const uint8_t *bytes,
                                          bool marked)
{
    uint64_t number = cl_packet_number(path->packets.next, packet->number);
    uint32_t length = cl_packet_whole_length(packet);
    struct cl_range place = {packet->offset, (uint64_t)packet->offset + packet->length};
    if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, number))
        ++*(endpoint->seal.auth == CL_AUTH_OFF ? &endpoint->stats.packets_foreign : &endpoint->stats.packets_forged);
    else if (length < CL_PACKET_HEAD_BYTES || length > CL_PACKET_HEAD_BYTES + peer->payload_bytes || !packet->length ||
             place.end > length)
        endpoint->stats.packets_foreign++;
    else if (cl_replay_seen(&path->packets, number))
        endpoint->stats.packets_replayed++;
    else if (peer->alive)
        return cl_fragments_put(&path->fragments, number, length, place, bytes + CL_PACKET_HEAD_BYTES, marked);
    return NULL;
}

uint64_t cl_endpoint_lacking(struct cl_endpoint *endpoint)
{
    uint64_t lacking = endpoint->lacking;
    endpoint->lacking = UINT64_MAX;
    return lacking;
}

/* Whether a rank of this job made the packet for this process, and it comes for the first time; counts it if not.
 * *number: the 64-bit number of the packet or of the acknowledgement. */
static bool authentic(struct cl_endpoint *endpoint, const struct cl_peer *peer, struct cl_path *path,
                      const struct cl_packet *packet, const uint8_t *bytes, uint64_t *number)
{
    bool ack = packet->kind == CL_PACKET_ACK;
    struct cl_replay *seen = ack ? &path->acks : &path->packets;
    *number = cl_packet_number(seen->next, ack ? cl_ack_number(packet) : packet->number);
    uint64_t *counter = NULL;
    bool off = endpoint->seal.auth == CL_AUTH_OFF;
    if (!cl_packet_open(bytes, cl_endpoint_seal(endpoint, peer), endpoint->config.self, *number))
        counter = off ? &endpoint->stats.packets_foreign : &endpoint->stats.packets_forged;
    else if (off && !cl_replay_near(seen, *number))
        counter = &endpoint->stats.packets_foreign;
    else if (!cl_replay_admit(seen, *number))
        counter = &endpoint->stats.packets_replayed;
    if (counter != NULL)
        (*counter)++;
    return counter == NULL;
}

void cl_endpoint_receive(struct cl_endpoint *endpoint, const uint8_t *bytes, size_t length, bool marked,
                         uint64_t received_us, uint64_t now_us)
{
    struct cl_packet packet;
    struct cl_peer *peer = NULL;
    if (cl_packet_decode(&packet, bytes, length))
        peer = cl_peer_list_find(&endpoint->peers, packet.source);
    if (peer == NULL || packet.epoch != cl_endpoint_epoch(endpoint, peer) || packet.path >= peer->path_count) {
        endpoint->stats.packets_foreign++;
        return;
    }
    struct cl_path *path = &peer->paths[packet.path];
    if (packet.kind == CL_PACKET_FRAGMENT) {
        const struct cl_whole *whole = on_fragment(endpoint, peer, path, &packet, bytes, marked);
        if (whole != NULL && cl_packet_kind(whole->bytes) != CL_PACKET_FRAGMENT)
            cl_endpoint_receive(endpoint, whole->bytes, cl_packet_whole_length(&packet), whole->marked, received_us,
                                now_us);
        return;
    }
    uint64_t number;
    if (!authentic(endpoint, peer, path, &packet, bytes, &number) || !peer->alive)
        return;
    const uint8_t *payload = bytes + CL_PACKET_HEAD_BYTES;
    enum answer answer;
    if (packet.kind == CL_PACKET_DATA)
        cl_congestion_received(&path->congestion, (uint32_t)length, received_us);
    bool expected = peer->expected;
    if (packet.kind == CL_PACKET_ACK)
        answer = on_ack(endpoint, peer, path, &packet, payload, received_us, now_us) ? ACCEPT : FOREIGN;
    else
        answer = on_packet(endpoint, peer, &packet, payload, now_us);
    if (answer == FOREIGN) {
        endpoint->stats.packets_foreign++;
        return;
    }
    if (expected && !peer->expected)
        for (uint16_t i = 0; i < peer->path_count; i++)
            cl_congestion_finished(&peer->paths[i].congestion);
    endpoint->stats.packets_received++;
    peer->heard = true;
    peer->heard_us = path->heard_us = now_us ? now_us : 1;
    if (packet.kind == CL_PACKET_ACK) {
        peer->answered_us = peer->heard_us;
        return;
    }
    path->packets_received++;
    path->ack.marked += marked;
    bool at_once = answer == ACCEPT_AT_ONCE || packet.flags & CL_PACKET_ACK_NOW;
    cl_ack_on_packet(&path->ack, number, answer == REFUSE, at_once, received_us, now_us);
    if (path->ack.deadline_us <= now_us)
        cl_peer_list_urge(&endpoint->peers, peer);
    else
        cl_endpoint_arm(endpoint, peer, path->ack.deadline_us);
}
