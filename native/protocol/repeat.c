#include "protocol/repeat.h"

#include "protocol/messages.h"
#include "protocol/packet.h"

/* The message of a packet that should leave again; NULL: it needs no copy. */
static struct cl_send *send_of(const struct cl_sent_packet *packet)
{
    if (packet == NULL || packet->kind != CL_PACKET_DATA || packet->again || packet->class >= CL_CLASSES_PROMPT)
        return NULL;
    struct cl_send *send = packet->data.send;
    const struct cl_message *message = &send->message;
    if (message->generation != packet->data.generation || send->next_packet < message->packet_count ||
        message->loss_budget || send->held || send->probing || cl_message_has_arrived(message, packet->data.packet))
        return NULL;
    return send;
}

/* Whether a window or a pacer makes packets wait that would leave before copies, or with them. */
static bool has_data(const struct cl_peer *peer)
{
    for (int i = 0; i < CL_CLASSES_PROMPT; i++)
        if (peer->node.classes[i].sends.first != NULL)
            return true;
    return false;
}

/* Whether copies of so many bytes may leave; they count as sent. */
static bool take_time(struct cl_path *path, uint64_t bytes, uint64_t now_us)
{
    uint64_t rate = cl_congestion_nic_rate(&path->nic->congestion), *end_us = &path->nic->repeats_end_us;
    if (!rate)
        return false;
    uint64_t begin_us = *end_us > now_us ? *end_us : now_us, took_us = bytes * 1000000 / rate;
    if (begin_us + took_us - now_us > cl_rtt_base_us(&path->rtt) / CL_REPEAT_MOST)
        return false;
    *end_us = begin_us + took_us;
    return true;
}

void cl_repeat(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us)
{
    uint64_t first = path->repeated > path->sent.low ? path->repeated : path->sent.low, bytes = 0;
    path->repeated = path->sent.next;
    if (has_data(peer))
        return; /* this is no pause */
    for (uint64_t number = first; number < path->sent.next; number++) {
        const struct cl_sent_packet *packet = cl_sent_find(&path->sent, number);
        bytes += send_of(packet) != NULL ? packet->bytes : 0;
    }
    if (!bytes || !take_time(path, bytes, now_us))
        return;
    for (uint64_t number = first; number < path->sent.next; number++) {
        const struct cl_sent_packet *packet = cl_sent_find(&path->sent, number);
        struct cl_send *send = send_of(packet);
        if (send == NULL || !cl_messages_give_back(endpoint, send, packet->data.packet))
            continue;
        send->repeated++;
        cl_messages_requeue(endpoint, send, false);
    }
}
