#include "protocol/outcome.h"

#include "protocol/messages.h"
#include "protocol/packet.h"
#include "protocol/partial.h"

/* The send of a DATA packet; NULL if it has ended, or is about to end by a STOP. */
static struct cl_send *send_of(const struct cl_sent_packet *packet)
{
    struct cl_send *send = packet->data.send;
    return packet->kind == CL_PACKET_DATA && send->message.generation == packet->data.generation &&
                   !send->partial.stopped
               ? send
               : NULL;
}

static void on_control_acked(struct cl_peer *peer, const struct cl_sent_packet *packet)
{
    if (packet->kind != CL_PACKET_STOP)
        return;
    struct cl_message_id id = cl_control_id(&packet->control);
    cl_stops_acked(&peer->stops, &id, packet->control.first_packet);
}

static void on_done(struct cl_endpoint *endpoint, struct cl_send *send, uint32_t packet)
{
    send->accepted = true;
    send->probing = false;
    bool first = cl_send_arrive(send, packet);
    if (first)
        cl_partial_done(send, packet);
    if (first && cl_message_complete(&send->message))
        cl_messages_complete(endpoint, &send->message, CL_OK);
    else {
        cl_messages_requeue(endpoint, send, false); /* it may have waited for this packet: see cl_peer_wary */
        cl_partial_run_out(endpoint, send);         /* an earlier PROBE may have been refused */
    }
}

static void on_acked(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    struct cl_peer *peer = outcome->peer;
    on_control_acked(peer, packet);
    struct cl_send *send = send_of(packet);
    if (send == NULL)
        return;
    send->packets_in_flight--;
    if (send->probing && peer->held.first != NULL) {
        /* the receiver has room again: try the next held message at once */
        peer->held_us = outcome->now_us;
        peer->held_wait_us = CL_PEER_HELD_MIN_US;
        cl_endpoint_arm(outcome->endpoint, peer, peer->held_us);
    }
    on_done(outcome->endpoint, send, packet->data.packet);
}

static void on_late(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    outcome->endpoint->stats.packets_spurious++;
    on_control_acked(outcome->peer, packet);
    struct cl_send *send = send_of(packet);
    if (send != NULL)
        on_done(outcome->endpoint, send, packet->data.packet);
}

static void on_refused(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    struct cl_endpoint *endpoint = outcome->endpoint;
    if (packet->kind == CL_PACKET_PROBE)
        cl_partial_on_probe_refused(endpoint, outcome->peer, &packet->control);
    if (packet->kind == CL_PACKET_REQUEST)
        cl_peer_list_tell(&endpoint->peers, outcome->peer, packet->kind, packet->control);
    struct cl_send *send = send_of(packet);
    if (send == NULL)
        return;
    send->packets_in_flight--;
    send->probing = false;
    if (!cl_message_has_arrived(&send->message, packet->data.packet)) { /* else the receiver took another copy in */
        send->partial.has_run_out = false;                              /* this packet has to be sent again */
        send->refused++;
        if (!cl_messages_give_back(endpoint, send, packet->data.packet))
            return;
    }
    if (!cl_send_sendable(send))
        return;
    if (send->held || cl_peer_ready_since(outcome->peer, &send->message.id, packet->sent_us)) {
        cl_messages_requeue(endpoint, send, true);
        return;
    }
    if (send->queued)
        cl_queue_remove(&endpoint->queue, &outcome->peer->node, send);
    cl_peer_hold(outcome->peer, send, outcome->now_us);
    cl_endpoint_arm(endpoint, outcome->peer, outcome->peer->held_us);
}

static void on_lost(void *argument, const struct cl_sent_packet *packet)
{
    struct cl_outcome *outcome = argument;
    outcome->endpoint->stats.packets_lost++;
    struct cl_send *send = send_of(packet);
    if (send != NULL) {
        send->packets_in_flight--;
        if (cl_partial_give_up(outcome->endpoint, send, packet->data.packet)) {
            cl_messages_requeue(outcome->endpoint, send, false); /* as in on_done */
            cl_partial_run_out(outcome->endpoint, send);
            return;
        }
        if (!cl_messages_give_back(outcome->endpoint, send, packet->data.packet))
            return;
        if (send->queued) /* a message with lost packets goes first */
            cl_queue_remove(&outcome->endpoint->queue, &outcome->peer->node, send);
        cl_messages_requeue(outcome->endpoint, send, true);
    } else if (packet->kind != CL_PACKET_DATA && packet->kind != CL_PACKET_PING) {
        cl_peer_list_tell(&outcome->endpoint->peers, outcome->peer, packet->kind, packet->control);
    }
}

struct cl_path_callbacks cl_outcome_callbacks(struct cl_outcome *outcome)
{
    return (struct cl_path_callbacks){
        .acked = on_acked, .refused = on_refused, .lost = on_lost, .late = on_late, .argument = outcome};
}
