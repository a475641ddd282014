#include "protocol/messages.h"

#include "protocol/credit.h"

static void unlink_send(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_send *send)
{
    if (send->queued)
        cl_queue_remove(&endpoint->queue, &peer->node, send);
    if (send->held)
        cl_peer_unhold(peer, send);
    cl_credit_sent(endpoint, send);
}

static void unlink_receive(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_receive *receive)
{
    cl_index_remove(&endpoint->unposted, &receive->message.operation);
    if (receive->announced)
        cl_announcements_remove(&endpoint->announcements, receive);
    if (receive->partial.ending)
        cl_message_list_remove(&peer->ending, &receive->message);
    if (receive->message.posted) {
        peer->expected--;
        peer->lacking -= receive->message.packet_count - receive->message.packets_arrived;
    }
    cl_credit_leave(endpoint, receive);
    cl_unexpected_drop(&endpoint->unexpected, &receive->unexpected);
}

static void unlink_message(struct cl_endpoint *endpoint, struct cl_message *message)
{
    struct cl_peer *peer = endpoint->peers.list[message->peer];
    if (message->side == CL_MESSAGE_SEND)
        unlink_send(endpoint, peer, cl_message_as_send(message));
    else
        unlink_receive(endpoint, peer, cl_message_as_receive(message));
    if (message->posted)
        peer->outstanding--;
    cl_table_remove(&endpoint->table, message);
}

void cl_messages_complete(struct cl_endpoint *endpoint, struct cl_message *message, int status)
{
    if (!message->posted) {
        cl_messages_discard(endpoint, message);
        return;
    }
    unlink_message(endpoint, message);
    message->status = status;
    cl_message_list_append(&endpoint->completed, message);
}

void cl_messages_discard(struct cl_endpoint *endpoint, struct cl_message *message)
{
    unlink_message(endpoint, message);
    cl_table_recycle(&endpoint->table, message);
}

bool cl_messages_give_back(struct cl_endpoint *endpoint, struct cl_send *send, uint32_t packet)
{
    if (cl_send_give_back(send, packet))
        return true;
    cl_messages_complete(endpoint, &send->message, CL_ENOMEM);
    return false;
}

void cl_messages_requeue(struct cl_endpoint *endpoint, struct cl_send *send, bool first)
{
    if (send->queued || send->held || !cl_send_sendable(send))
        return;
    cl_queue_push(&endpoint->queue, &endpoint->peers.list[send->message.peer]->node, send, first);
}

void cl_messages_mismatch(struct cl_endpoint *endpoint, struct cl_receive *receive)
{
    struct cl_message *message = &receive->message;
    struct cl_peer *peer = endpoint->peers.list[message->peer];
    cl_history_add(&peer->history, &message->id);
    cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_MISMATCH, cl_control_message(&message->id));
    cl_messages_complete(endpoint, message, CL_EMISMATCH);
}
