#include "protocol/outcome.h"

#include "protocol/messages.h"
#include "protocol/packet.h"
#include "protocol/partial.h"

/* The message of a DATA packet; NULL if it has ended, or is about to end by a STOP. */
static struct cl_message *message_of(const struct cl_sent_packet *packet)
{
    struct cl_message *message = packet->data.message;
    return packet->kind == CL_PACKET_DATA && message->generation == packet->data.generation && !message->partial.stopped
               ? message
               : NULL;
}

static void on_control_acked(struct cl_peer *peer, const struct cl_sent_packet *packet)
{
    if (packet->kind != CL_PACKET_STOP)
        return;
    struct cl_message_id id = cl_control_id(&packet->control);
    cl_stops_acked(&peer->stops, &id, packet->control.first_packet);
}

static void on_done(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet)
{
    message->accepted = true;
    message->probing = false;
    bool first = cl_message_arrive(message, packet);
    if (first)
        cl_partial_done(message, packet);
    if (first && cl_message_complete(message))
        cl_messages_complete(endpoint, message, CL_OK);
    else {
        cl_messages_requeue(endpoint, message, false); /* it may have waited for this packet: see cl_peer_wary */
        cl_partial_run_out(endpoint, message);         /* an earlier PROBE may have been refused */
    }
}

static void on_acked(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    struct cl_peer *peer = outcome->peer;
    on_control_acked(peer, packet);
    struct cl_message *message = message_of(packet);
    if (!message)
        return;
    message->packets_in_flight--;
    if (message->probing && peer->held.first) {
        /* the receiver has room again: try the next held message at once */
        peer->held_us = outcome->now_us;
        peer->held_wait_us = CL_PEER_HELD_MIN_US;
        cl_endpoint_arm(outcome->endpoint, peer, peer->held_us);
    }
    on_done(outcome->endpoint, message, packet->data.packet);
}

static void on_late(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    outcome->endpoint->stats.packets_spurious++;
    on_control_acked(outcome->peer, packet);
    struct cl_message *message = message_of(packet);
    if (message)
        on_done(outcome->endpoint, message, packet->data.packet);
}

static void on_refused(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    struct cl_endpoint *endpoint = outcome->endpoint;
    if (packet->kind == CL_PACKET_PROBE)
        cl_partial_on_probe_refused(endpoint, outcome->peer, &packet->control);
    struct cl_message *message = message_of(packet);
    if (!message)
        return;
    message->packets_in_flight--;
    message->probing = false;
    if (!cl_message_has_arrived(message, packet->data.packet)) { /* else the receiver took another copy in */
        message->partial.has_run_out = false;                    /* this packet has to be sent again */
        message->refused++;
        if (!cl_messages_give_back(endpoint, message, packet->data.packet))
            return;
    }
    if (!cl_message_sendable(message))
        return;
    if (message->held || cl_peer_ready_since(outcome->peer, &message->id, packet->sent_us)) {
        cl_messages_requeue(endpoint, message, true);
        return;
    }
    if (message->queued)
        cl_queue_remove(&endpoint->queue, &outcome->peer->node, message);
    cl_peer_hold(outcome->peer, message, outcome->now_us);
    cl_endpoint_arm(endpoint, outcome->peer, outcome->peer->held_us);
}

static void on_lost(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    outcome->endpoint->stats.packets_lost++;
    struct cl_message *message = message_of(packet);
    if (message) {
        message->packets_in_flight--;
        if (cl_partial_give_up(outcome->endpoint, message, packet->data.packet)) {
            cl_messages_requeue(outcome->endpoint, message, false); /* as in on_done */
            cl_partial_run_out(outcome->endpoint, message);
            return;
        }
        if (!cl_messages_give_back(outcome->endpoint, message, packet->data.packet))
            return;
        if (message->queued) /* a message with lost packets goes first */
            cl_queue_remove(&outcome->endpoint->queue, &outcome->peer->node, message);
        cl_messages_requeue(outcome->endpoint, message, true);
    } else if (packet->kind != CL_PACKET_DATA && packet->kind != CL_PACKET_PING) {
        cl_peer_list_tell(&outcome->endpoint->peers, outcome->peer, packet->kind, packet->control);
    }
}

struct cl_path_callbacks cl_outcome_callbacks(struct cl_outcome *outcome)
{
    return (struct cl_path_callbacks){
        .acked = on_acked, .refused = on_refused, .lost = on_lost, .late = on_late, .argument = outcome};
}
