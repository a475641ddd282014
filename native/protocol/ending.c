#include "protocol/ending.h"

#include "protocol/messages.h"
#include "protocol/packet.h"

struct selection {
    struct cl_endpoint *endpoint;
    uint32_t group, sequence; /* UINT32_MAX: every sequence */
    uint16_t peer;
    int status;
};

static bool selected(const struct cl_message *message, const struct selection *selection)
{
    if (selection->sequence == UINT32_MAX)
        return (message->id.group & ~CL_GROUP_P2P) == selection->group;
    return message->id.group == selection->group && message->id.sequence == selection->sequence;
}

static void discard_selected(struct cl_message *message, void *argument)
{
    const struct selection *selection = argument;
    if (selected(message, selection))
        cl_messages_discard(selection->endpoint, message);
}

static void complete_selected(struct cl_message *message, void *argument)
{
    const struct selection *selection = argument;
    if (selected(message, selection))
        cl_messages_complete(selection->endpoint, message, selection->status);
}

static void complete_peer(struct cl_message *message, void *argument)
{
    const struct selection *selection = argument;
    if (message->peer == selection->peer && message->posted)
        cl_messages_complete(selection->endpoint, message, selection->status);
}

static void drop_completions(struct cl_endpoint *endpoint, const struct selection *selection)
{
    for (struct cl_message *message = endpoint->completed.first, *next; message != NULL; message = next) {
        next = message->next;
        if (!selected(message, selection))
            continue;
        cl_message_list_remove(&endpoint->completed, message);
        cl_table_recycle(&endpoint->table, message);
    }
}

void cl_endpoint_cancel(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence)
{
    struct selection selection = {.endpoint = endpoint, .group = group, .sequence = sequence};
    cl_table_each(&endpoint->table, discard_selected, &selection);
    drop_completions(endpoint, &selection);
    if (sequence == UINT32_MAX)
        cl_closed_groups_add(&endpoint->closed, group, 0, UINT16_MAX);
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        struct cl_peer *peer = endpoint->peers.list[i];
        if (peer == NULL)
            continue;
        if (sequence != UINT32_MAX) {
            cl_history_add_sequence(&peer->history, group, sequence);
            continue;
        }
        cl_history_drop_group(&peer->history, group);
        cl_history_drop_group(&peer->history, group | CL_GROUP_P2P);
    }
}

/* Remembers that the group failed, and completes its messages. False when it had ended before. */
static bool close_group(struct cl_endpoint *endpoint, uint32_t group, int reason, uint16_t culprit)
{
    if (!cl_closed_groups_add(&endpoint->closed, group, reason < 0 ? reason : CL_EABORTED, culprit))
        return false;
    struct selection selection = {.endpoint = endpoint, .group = group, .sequence = UINT32_MAX, .status = CL_EABORTED};
    cl_table_each(&endpoint->table, complete_selected, &selection);
    return true;
}

void cl_endpoint_fail_group(struct cl_endpoint *endpoint, uint32_t group, int reason, uint16_t culprit)
{
    if (close_group(endpoint, group, reason, culprit))
        cl_closed_groups_report(&endpoint->closed, group);
}

bool cl_endpoint_abort(struct cl_endpoint *endpoint, uint32_t group, const uint16_t *peers, size_t count, int reason,
                       uint16_t culprit)
{
    bool told = true;
    close_group(endpoint, group, reason, culprit);
    for (size_t i = 0; i < count; i++) {
        struct cl_peer *peer = cl_peer_list_find(&endpoint->peers, peers[i]);
        if (peer != NULL) /* or lost: if it still hears this process, it need not wait for a timeout of its own */
            told &=
                cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_ABORT, cl_control_abort(group, reason, culprit));
    }
    return told;
}

bool cl_endpoint_next_abort(struct cl_endpoint *endpoint, struct cl_closed_group *aborted)
{
    return cl_closed_groups_next_report(&endpoint->closed, aborted);
}

const struct cl_closed_group *cl_endpoint_find_abort(const struct cl_endpoint *endpoint, uint32_t group)
{
    const struct cl_closed_group *closed = cl_closed_groups_find(&endpoint->closed, group);
    return closed != NULL && closed->reason ? closed : NULL;
}

void cl_endpoint_peer_lost(struct cl_endpoint *endpoint, uint16_t peer)
{
    struct cl_peer *lost = cl_peer_list_find(&endpoint->peers, peer);
    if (lost == NULL || !lost->alive)
        return;
    struct selection selection = {.endpoint = endpoint, .peer = peer, .status = CL_EPEERLOST};
    cl_table_each(&endpoint->table, complete_peer, &selection);
    cl_peer_lose(lost);
}
