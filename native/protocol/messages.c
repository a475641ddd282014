#include "protocol/messages.h"

static void unlink_message(struct cl_endpoint *endpoint, struct cl_message *message)
{
    struct cl_peer *peer = endpoint->peers.list[message->peer];
    if (message->queued)
        cl_queue_remove(&endpoint->queue, &peer->node, message);
    if (message->held)
        cl_peer_unhold(peer, message);
    if (message->announced)
        cl_announcements_remove(&endpoint->announcements, message);
    if (message->partial.ending)
        cl_message_list_remove(&peer->ending, message);
    if (message->posted) {
        peer->outstanding--;
        if (message->side == CL_MESSAGE_RECEIVE) {
            peer->expected--;
            peer->lacking -= message->packet_count - message->packets_arrived;
        }
    }
    cl_unexpected_drop(&endpoint->unexpected, &message->unexpected);
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

bool cl_messages_give_back(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet)
{
    if (cl_message_give_back(message, packet))
        return true;
    cl_messages_complete(endpoint, message, CL_ENOMEM);
    return false;
}

void cl_messages_requeue(struct cl_endpoint *endpoint, struct cl_message *message, bool first)
{
    if (message->queued || message->held || !cl_message_sendable(message))
        return;
    cl_queue_push(&endpoint->queue, &endpoint->peers.list[message->peer]->node, message, first);
}

void cl_messages_mismatch(struct cl_endpoint *endpoint, struct cl_message *message)
{
    struct cl_peer *peer = endpoint->peers.list[message->peer];
    cl_history_add(&peer->history, &message->id);
    cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_MISMATCH, cl_control_message(&message->id));
    cl_messages_complete(endpoint, message, CL_EMISMATCH);
}
