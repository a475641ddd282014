#include "protocol/endpoint.h"

#include <stdlib.h>

#include "protocol/credit.h"
#include "protocol/messages.h"
#include "protocol/packet.h"
#include "protocol/partial.h"
#include "protocol/placement.h"

enum { DATAGRAM_BYTES_MIN = 128 };

int cl_endpoint_create(const struct cl_endpoint_config *config, struct cl_endpoint **endpoint)
{
    if (config->datagram_bytes < DATAGRAM_BYTES_MIN || config->datagram_bytes > CL_ENDPOINT_DATAGRAM_BYTES_MAX ||
        config->auth > CL_AUTH_OFF || cl_congestion_find(config->rate_control) == NULL)
        return CL_EINVAL;
    struct cl_endpoint *made = calloc(1, sizeof(*made));
    if (made == NULL)
        return CL_ENOMEM;
    made->config = *config;
    made->lacking = UINT64_MAX;
    made->seal = (struct cl_seal){config->auth, config->job, cl_siphash_key(config->key), &made->nh};
    cl_packet_expand_key(&made->nh, &made->seal.key);
    made->payload_bytes = cl_packet_payload_bytes(config->datagram_bytes);
    cl_budget_init(&made->budget, config->credit_bytes);
    cl_unexpected_init(&made->unexpected, config->unexpected_limit_bytes, made->payload_bytes);
    *endpoint = made;
    return CL_OK;
}

static void drop_unexpected(struct cl_message *message, void *argument)
{
    struct cl_endpoint *endpoint = argument;
    struct cl_receive *receive = cl_message_as_receive(message);
    if (receive != NULL)
        cl_unexpected_drop(&endpoint->unexpected, &receive->unexpected);
}

void cl_endpoint_destroy(struct cl_endpoint *endpoint)
{
    if (endpoint == NULL)
        return;
    cl_table_each(&endpoint->table, drop_unexpected, endpoint);
    cl_table_free(&endpoint->table);
    cl_unexpected_free(&endpoint->unexpected);
    cl_index_free(&endpoint->unposted);
    cl_timers_free(&endpoint->timers);
    cl_outbox_free(&endpoint->outbox);
    cl_signatures_free(&endpoint->signatures);
    cl_peer_list_free(&endpoint->peers);
    cl_announcements_free(&endpoint->announcements);
    cl_ranges_free(&endpoint->missing);
    free(endpoint);
}

/* An interface that no peer is reached through has no state: that of the neighbours is large. */
static void begin_nics(struct cl_endpoint *endpoint, uint16_t count)
{
    const struct cl_rate_control_type *rate_control = cl_congestion_find(endpoint->config.rate_control);
    for (; endpoint->nics.count < count; endpoint->nics.count++)
        cl_congestion_nic_init(&endpoint->nics.list[endpoint->nics.count].congestion, rate_control,
                               endpoint->config.datagram_bytes);
}

int cl_endpoint_add_peer(struct cl_endpoint *endpoint, uint16_t peer, uint16_t path_count, const uint32_t *interfaces)
{
    if (path_count < 1 || path_count > CL_PEER_PATHS_MAX || cl_peer_list_find(&endpoint->peers, peer) != NULL)
        return CL_EINVAL;
    struct cl_nic *nics[CL_PEER_PATHS_MAX];
    uint16_t nic_count = endpoint->nics.count;
    for (uint16_t i = 0; i < path_count; i++) {
        uint32_t interface = interfaces != NULL ? interfaces[i] : i;
        if (interface >= CL_PEER_PATHS_MAX)
            return CL_EINVAL;
        nics[i] = &endpoint->nics.list[interface];
        if (interface >= nic_count)
            nic_count = (uint16_t)(interface + 1);
    }
    if (!cl_peer_list_reserve(&endpoint->peers, peer) ||
        !cl_timers_reserve(&endpoint->timers, endpoint->peers.count + 3))
        return CL_ENOMEM;
    begin_nics(endpoint, nic_count);
    struct cl_peer *made = cl_peer_create(peer, path_count, nics, endpoint->config.datagram_bytes);
    if (made == NULL)
        return CL_ENOMEM;
    if (endpoint->config.peer_timeout_us)
        made->timeout_us = endpoint->config.peer_timeout_us;
    for (uint16_t i = 0; i < path_count; i++)
        made->paths[i].port = &endpoint->outbox.ports[nics[i] - endpoint->nics.list];
    made->payload_bytes = endpoint->payload_bytes;
    made->history.in_flight = &endpoint->signatures;
    cl_peer_list_add(&endpoint->peers, made);
    cl_peer_list_urge(&endpoint->peers, made); /* the first PINGs measure the empty network */
    cl_endpoint_arm(endpoint, made, 0);
    return CL_OK;
}

int cl_endpoint_ping(struct cl_endpoint *endpoint, uint16_t peer)
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL || !known->alive)
        return CL_EINVAL;
    for (uint16_t i = 0; i < known->path_count; i++)
        known->paths[i].ping = true;
    cl_peer_list_urge(&endpoint->peers, known);
    return CL_OK;
}

int cl_endpoint_pause(struct cl_endpoint *endpoint, uint16_t peer, uint32_t path, bool paused)
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL || path >= known->path_count)
        return CL_EINVAL;
    known->paths[path].paused = paused;
    cl_queue_unblock(&endpoint->queue, &known->node); /* another path may have room */
    return CL_OK;
}

int cl_endpoint_key_peer(struct cl_endpoint *endpoint, uint16_t peer, const uint8_t key[16])
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL)
        return CL_EINVAL;
    known->seal = (struct cl_seal){endpoint->config.auth, endpoint->config.job, cl_siphash_key(key), &endpoint->nh};
    known->keyed = true;
    return CL_OK;
}

int cl_endpoint_credit_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t unscheduled_bytes)
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL)
        return CL_EINVAL;
    known->grants = true;
    known->unscheduled_bytes = unscheduled_bytes;
    return CL_OK;
}

struct cl_told cl_endpoint_tell(const struct cl_endpoint *endpoint, uint32_t interface)
{
    if (interface >= endpoint->nics.count)
        return (struct cl_told){0};
    struct cl_told told = cl_congestion_nic_tell(&endpoint->nics.list[interface].congestion);
    told.owed = endpoint->ledger.owed_bytes;
    return told;
}

void cl_endpoint_hear(struct cl_endpoint *endpoint, uint32_t interface, uint32_t neighbour, const struct cl_told *told,
                      uint64_t now_us)
{
    if (interface >= endpoint->nics.count)
        return;
    cl_congestion_nic_hear(&endpoint->nics.list[interface].congestion, neighbour, told, now_us);
    cl_budget_hear(&endpoint->budget, neighbour, told->owed);
}

bool cl_endpoint_heard(struct cl_endpoint *endpoint, uint64_t now_us)
{
    bool shared = false;
    cl_budget_heard(&endpoint->budget);
    for (uint32_t i = 0; i < endpoint->nics.count; i++)
        shared |= cl_congestion_nic_heard(&endpoint->nics.list[i].congestion, now_us);
    return shared;
}

int cl_endpoint_bind_peer(struct cl_endpoint *endpoint, uint16_t peer, const uint32_t *ports)
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    for (uint16_t i = 0; known != NULL && i < known->path_count; i++)
        if (ports[i] >= CL_OUTBOX_PORTS)
            known = NULL;
    if (known == NULL)
        return CL_EINVAL;
    for (uint16_t i = 0; i < known->path_count; i++)
        known->paths[i].port = &endpoint->outbox.ports[ports[i]];
    return CL_OK;
}

bool cl_endpoint_can_cut(const struct cl_endpoint *endpoint, uint32_t payload_bytes)
{
    return payload_bytes > 0 && payload_bytes % 8 == 0 && payload_bytes <= endpoint->payload_bytes;
}

int cl_endpoint_cut_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t payload_bytes)
{
    struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL || !cl_endpoint_can_cut(endpoint, payload_bytes))
        return CL_EINVAL;
    known->payload_bytes = payload_bytes;
    for (uint16_t i = 0; i < known->path_count; i++)
        cl_mtu_init(&known->paths[i].mtu, CL_PACKET_HEAD_BYTES + payload_bytes);
    return CL_OK;
}

bool cl_endpoint_next_completion(struct cl_endpoint *endpoint, struct cl_completion *completion)
{
    struct cl_message *message = endpoint->completed.first;
    if (message == NULL)
        return false;
    cl_message_list_remove(&endpoint->completed, message);
    *completion = (struct cl_completion){
        .context = message->context, .status = message->status, .peer = message->peer, .first_us = message->first_us};
    const struct cl_send *send = cl_message_as_send(message);
    bool stopped = send != NULL && send->partial.stopped;
    if (message->loss_budget && message->status == CL_OK && (stopped || !cl_message_complete(message))) {
        cl_ranges_clear(&endpoint->missing);
        if (!cl_message_missing(message, stopped ? send->counted : message->arrived, &endpoint->missing))
            completion->status = CL_ENOMEM;
        completion->missing = endpoint->missing.list;
        completion->missing_count = endpoint->missing.count;
    }
    cl_table_recycle(&endpoint->table, message);
    return true;
}

/* The first part of both kinds of post. */
static int begin(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_message *message, uint32_t length,
                 const struct cl_blocks *blocks, uint64_t now_us, void *context)
{
    uint32_t block_bytes = blocks->encoded_bytes ? blocks->encoded_bytes : 1;
    if (!cl_message_begin(message, length, peer->payload_bytes - peer->payload_bytes % block_bytes)) {
        cl_messages_discard(endpoint, message);
        return CL_ENOMEM;
    }
    message->posted = true;
    message->signature = cl_signatures_find(&endpoint->signatures, message->id.group, message->id.sequence);
    message->context = context;
    if (message->side == CL_MESSAGE_RECEIVE) {
        peer->expected++;
        peer->lacking += message->packet_count;
    }
    if (!peer->outstanding++)
        cl_endpoint_activate(endpoint, peer, now_us);
    return CL_OK;
}

static int check_post(const struct cl_endpoint *endpoint, const struct cl_peer *peer, const struct cl_message_id *id,
                      const struct cl_qos *qos)
{
    if (peer == NULL || id->sequence == UINT32_MAX || qos->priority >= CL_CLASSES_BETWEEN_HOSTS ||
        qos->blocks.encoded_bytes > peer->payload_bytes ||
        !(qos->loss_bound >= 0 && qos->loss_bound <= CL_LOSS_BOUND_MAX) ||
        (qos->protect != NULL && !qos->protect_bytes))
        return CL_EINVAL;
    const struct cl_closed_group *closed = cl_closed_groups_find(&endpoint->closed, id->group & ~CL_GROUP_P2P);
    if (closed != NULL)
        return closed->reason ? CL_EABORTED : CL_ECLOSED;
    return peer->alive ? CL_OK : CL_EPEERLOST;
}

int cl_endpoint_post_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, const void *data,
                          uint32_t length, const struct cl_qos *qos, uint64_t now_us, void *context)
{
    struct cl_peer *to = cl_peer_list_find(&endpoint->peers, peer);
    int status = check_post(endpoint, to, &id, qos);
    if (status != CL_OK)
        return status;
    if (cl_table_find_send(&endpoint->table, peer, &id) != NULL)
        return CL_EINVAL;
    struct cl_send *send = cl_table_add_send(&endpoint->table, peer, &id);
    if (send == NULL)
        return CL_ENOMEM;
    if ((status = begin(endpoint, to, &send->message, length, &qos->blocks, now_us, context)) != CL_OK)
        return status;
    send->data = data;
    send->priority = qos->priority;
    send->order = qos->order;
    cl_credit_request(endpoint, to, send, now_us);
    if (qos->loss_bound > 0)
        cl_partial_begin_send(send, qos);
    cl_messages_requeue(endpoint, send, false);
    return CL_OK;
}

bool cl_endpoint_is_sending(const struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id)
{
    return cl_table_find_send(&endpoint->table, peer, &id) != NULL;
}

void cl_endpoint_move_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, const void *data)
{
    struct cl_send *send = cl_table_find_send(&endpoint->table, peer, &id);
    cl_outbox_move(&endpoint->outbox, &send->message, send->data, data);
    send->data = data;
}

uint64_t cl_endpoint_round_us(const struct cl_endpoint *endpoint, uint16_t id)
{
    const struct cl_peer *peer = endpoint->peers.list[id];
    uint64_t round_us = 0;
    for (uint16_t i = 0; i < peer->path_count; i++) {
        const struct cl_rtt *rtt = &peer->paths[i].rtt;
        if (rtt->network.any && (round_us == 0 || cl_rtt_base_us(rtt) < round_us))
            round_us = cl_rtt_base_us(rtt);
    }
    return round_us;
}

static bool recently_refused(const struct cl_peer *peer, uint64_t now_us)
{
    return peer->refused_us && now_us < peer->refused_us + CL_PEER_REFUSED_US;
}

int cl_endpoint_post_receive(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, struct cl_sink sink,
                             uint32_t length, const struct cl_qos *qos, uint64_t now_us, void *context)
{
    struct cl_peer *from = cl_peer_list_find(&endpoint->peers, peer);
    int status = check_post(endpoint, from, &id, qos);
    if (status != CL_OK && status != CL_EPEERLOST)
        return status;
    struct cl_receive *receive = cl_table_find_receive(&endpoint->table, peer, &id);
    bool p2p = id.group & CL_GROUP_P2P;
    if ((receive != NULL && receive->message.posted) || cl_history_contains(&from->history, &id) ||
        (p2p && id.index != cl_history_next_index(&from->history, id.group, id.sequence)))
        return CL_EINVAL;
    if (status == CL_EPEERLOST && receive == NULL)
        return status;
    if (p2p && !cl_history_add_posted(&from->history, &id))
        return CL_ENOMEM;
    if (receive == NULL && (receive = cl_table_add_receive(&endpoint->table, peer, &id)) == NULL)
        return CL_ENOMEM;
    struct cl_message *message = &receive->message;
    if ((status = begin(endpoint, from, message, length, &qos->blocks, now_us, context)) != CL_OK)
        return status;
    receive->sink = sink;
    receive->credit.class = qos->priority;
    cl_credit_posted(endpoint, receive, now_us);
    cl_index_remove(&endpoint->unposted, &message->operation);
    if (receive->announced)
        cl_announcements_remove(&endpoint->announcements, receive);
    bool refused = recently_refused(from, now_us);
    uint32_t generation = message->generation;
    if (qos->loss_bound > 0 || receive->partial.told_budget)
        cl_partial_begin_receive(endpoint, receive, qos, refused, now_us);
    if (message->generation != generation || !cl_placement_replay(endpoint, receive, now_us))
        return CL_OK;
    if (!from->alive)
        cl_messages_complete(endpoint, message, CL_EPEERLOST); /* the lost peer had not sent all of it */
    else if (refused)
        cl_peer_list_tell(&endpoint->peers, from, CL_PACKET_READY,
                          (struct cl_control){.group = id.group, .sequence = id.sequence});
    return CL_OK;
}

/* ---- point-to-point messages ---- */

uint32_t cl_endpoint_next_index(const struct cl_endpoint *endpoint, uint16_t peer, uint32_t group, uint32_t tag)
{
    const struct cl_peer *from = cl_peer_list_find(&endpoint->peers, peer);
    return from != NULL ? cl_history_next_index(&from->history, group, tag) : 0;
}

bool cl_endpoint_find_announced(const struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint16_t *peer)
{
    for (const struct cl_message *message = endpoint->announcements.messages.first; message != NULL;
         message = message->next)
        if (message->id.group == group && message->id.sequence == tag &&
            message->id.index == cl_endpoint_next_index(endpoint, message->peer, group, tag)) {
            *peer = message->peer;
            return true;
        }
    return false;
}

bool cl_endpoint_want(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint64_t now_us)
{
    if (cl_announcements_wants(&endpoint->announcements, group, tag))
        return true;
    bool first = !endpoint->announcements.wanted_count;
    if (!cl_announcements_want(&endpoint->announcements, group, tag))
        return false;
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        struct cl_peer *peer = endpoint->peers.list[i];
        if (peer != NULL && first && !peer->outstanding)
            cl_endpoint_activate(endpoint, peer, now_us);
        if (peer != NULL && recently_refused(peer, now_us))
            cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_READY,
                              (struct cl_control){.group = group, .sequence = tag});
    }
    return true;
}

void cl_endpoint_unwant(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag)
{
    if (!cl_announcements_unwant(&endpoint->announcements, group, tag))
        return;
    for (struct cl_message *message = endpoint->announcements.messages.first, *next; message != NULL; message = next) {
        next = message->next;
        if (message->id.group == group && message->id.sequence == tag &&
            cl_message_as_receive(message)->unexpected.first == NULL)
            cl_messages_discard(endpoint, message);
    }
}

/* ---- operations ---- */

int cl_endpoint_begin(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence, uint16_t signature)
{
    if (!cl_signatures_add(&endpoint->signatures, group, sequence, signature))
        return CL_ENOMEM;
    struct cl_index_place *place = cl_index_find(&endpoint->unposted, cl_index_operation(group, sequence));
    for (; place != NULL; place = cl_index_next(place)) {
        const struct cl_message *message = CL_INDEX_THING(place, struct cl_message, operation);
        if (!cl_signatures_differ(message->signature, signature))
            continue;
        cl_endpoint_fail_group(endpoint, group, CL_EMISMATCH, message->peer);
        break;
    }
    return CL_OK;
}

void cl_endpoint_delay(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence)
{
    (void)cl_signatures_add(&endpoint->signatures, group, sequence, 0); /* without memory it may be forgotten */
}

void cl_endpoint_end(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence)
{
    cl_signatures_remove(&endpoint->signatures, group, sequence);
}

struct lateness {
    uint32_t group, sequence;
    const struct cl_message *first; /* the message of the lowest index: later ones may wait for other peers */
};

static void find_late(struct cl_message *message, void *argument)
{
    struct lateness *late = argument;
    if (message->posted && message->side == CL_MESSAGE_RECEIVE && message->id.group == late->group &&
        message->id.sequence == late->sequence && (late->first == NULL || message->id.index < late->first->id.index))
        late->first = message;
}

uint16_t cl_endpoint_late_peer(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence)
{
    struct lateness late = {group, sequence, NULL};
    cl_table_each(&endpoint->table, find_late, &late);
    return late.first != NULL ? late.first->peer : UINT16_MAX;
}

uint32_t cl_endpoint_slowest_us(const struct cl_endpoint *endpoint)
{
    uint32_t slowest_us = 0;
    for (uint32_t i = 0; i < endpoint->peers.length; i++) {
        const struct cl_peer *peer = endpoint->peers.list[i];
        for (uint16_t j = 0; peer != NULL && peer->alive && j < peer->path_count; j++) {
            const struct cl_rtt *rtt = &peer->paths[j].rtt;
            uint32_t probe_us = rtt->smoothed_us + 4 * rtt->variation_us;
            if (rtt->any && probe_us > slowest_us)
                slowest_us = probe_us;
        }
    }
    return slowest_us < CL_LOSS_PTO_MAX_US ? slowest_us : CL_LOSS_PTO_MAX_US;
}

bool cl_endpoint_peer_silent(const struct cl_endpoint *endpoint, uint16_t peer, uint64_t now_us)
{
    const struct cl_peer *found = cl_peer_list_find(&endpoint->peers, peer);
    return found == NULL || !found->alive || (found->heard_us && now_us >= cl_peer_lost_us(found));
}

const struct cl_engine_stats *cl_endpoint_stats(const struct cl_endpoint *endpoint)
{
    return &endpoint->stats;
}

int cl_endpoint_read_paths(const struct cl_endpoint *endpoint, uint16_t peer, struct cl_path_stats *paths,
                           uint32_t capacity)
{
    const struct cl_peer *known = cl_peer_list_find(&endpoint->peers, peer);
    if (known == NULL)
        return CL_EINVAL;
    for (uint16_t i = 0; i < known->path_count && i < capacity; i++)
        cl_path_read(&known->paths[i], &paths[i]);
    return known->path_count;
}
