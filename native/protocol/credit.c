#include "protocol/credit.h"

#include "protocol/endpoint_state.h"

enum {
    GRANT_BYTES = 16384, /* bytes of one GRANT, at least a packet */
    WRITE_OFF_US = 8000, /* twice the time that an idle receiver's engine may sleep, besides round trips ... */
    WRITE_OFF_ROUNDS = 4,
};

static uint32_t lesser(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- sender ---- */

void cl_credit_request(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_send *send, uint64_t now_us)
{
    uint32_t bytes = send->message.packet_bytes;
    uint32_t unscheduled = peer->unscheduled_bytes / bytes + (peer->unscheduled_bytes % bytes > 0);
    if (!peer->grants || send->message.id.group & CL_GROUP_P2P || send->message.packet_count == 1 ||
        send->message.packet_count <= unscheduled)
        return;
    struct cl_control control = cl_control_message(&send->message.id);
    control.first_packet = unscheduled;
    if (!cl_peer_list_tell(&endpoint->peers, peer, CL_PACKET_REQUEST, control))
        return; /* no memory */
    send->granted = unscheduled;
    send->asked_us = now_us;
    endpoint->ledger.sends++;
}

struct cl_send *cl_credit_on_grant(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet)
{
    struct cl_message_id id = {packet->group, packet->sequence, packet->index};
    struct cl_send *send = cl_table_find_send(&endpoint->table, peer->id, &id);
    uint32_t granted = send != NULL ? lesser(packet->offset, send->message.packet_count) : 0;
    if (send == NULL || send->granted >= granted)
        return NULL;
    send->granted = granted;
    return send;
}

void cl_credit_sent(struct cl_endpoint *endpoint, const struct cl_send *send)
{
    endpoint->ledger.sends -= send->granted != UINT32_MAX;
}

/* ---- receiver ---- */

void cl_credit_measured(struct cl_endpoint *endpoint, const struct cl_rtt *rtt)
{
    if (!endpoint->budget.derived || !rtt->any)
        return;
    double capacity = 0;
    for (uint16_t i = 0; i < endpoint->nics.count; i++)
        capacity += (double)cl_congestion_nic_tell(&endpoint->nics.list[i].congestion).capacity;
    /* the grant waits in the sender's host, and its packets in this one; both hosts run the same engine */
    cl_budget_measure(&endpoint->budget, capacity, cl_rtt_base_us(rtt) + 2.0 * rtt->host_us);
}

/* Nothing is left to grant, and nothing is owed. */
static void settle(struct cl_ledger *ledger, struct cl_receive *receive)
{
    if (receive->credit.listed && receive->credit.owed == 0 && receive->credit.granted >= receive->message.packet_count)
        cl_ledger_remove(ledger, receive);
}

/* How long no packet may come before what is owed is written off. What is within the loss bound may have been lost and
 * given up by the sender, so it keeps nobody waiting for longer than its retransmission would. */
static uint64_t patience_us(const struct cl_endpoint *endpoint, const struct cl_receive *receive)
{
    const struct cl_peer *peer = endpoint->peers.list[receive->message.peer];
    uint64_t round_us = peer->paths[0].rtt.smoothed_us;
    return receive->credit.owed <= receive->message.loss_budget ? round_us : WRITE_OFF_US + WRITE_OFF_ROUNDS * round_us;
}

/* Packets that a message may owe: those of one grant, or, where few messages wait, up to all of the budget. */
static uint32_t most_owed(const struct cl_endpoint *endpoint, const struct cl_receive *receive, uint32_t quantum)
{
    uint64_t share = cl_budget_share(&endpoint->budget) / endpoint->ledger.count / receive->message.packet_bytes;
    return share < quantum ? quantum : share < UINT32_MAX / 2 ? (uint32_t)share : UINT32_MAX / 2;
}

static void owe(struct cl_endpoint *endpoint, struct cl_receive *receive, uint32_t packets, uint64_t now_us)
{
    receive->credit.owed += packets;
    receive->credit.owed_us = now_us;
    endpoint->ledger.owed_bytes += (uint64_t)packets * receive->message.packet_bytes;
    cl_timers_arm(&endpoint->timers, &endpoint->ledger.timer, now_us + patience_us(endpoint, receive));
}

static void write_off(struct cl_ledger *ledger, struct cl_receive *receive)
{
    ledger->owed_bytes -= (uint64_t)receive->credit.owed * receive->message.packet_bytes;
    receive->credit.owed = 0;
}

/* Whether the budget has room for a GRANT. Something always moves: a budget may be less than a packet. */
static bool has_room(const struct cl_endpoint *endpoint)
{
    uint64_t owed = endpoint->ledger.owed_bytes;
    return owed == 0 || owed + GRANT_BYTES <= cl_budget_share(&endpoint->budget);
}

static void grant(struct cl_endpoint *endpoint, uint64_t now_us)
{
    struct cl_ledger *ledger = &endpoint->ledger;
    struct cl_receive *receive = ledger->first;
    while (receive != NULL && has_room(endpoint)) {
        const struct cl_message *message = &receive->message;
        uint32_t quantum = GRANT_BYTES / message->packet_bytes, left = message->packet_count - receive->credit.granted;
        quantum = quantum > 0 ? quantum : 1;
        if (left == 0 || receive->credit.owed + quantum > most_owed(endpoint, receive, quantum)) {
            receive = receive->credit.next;
            continue;
        }
        uint32_t packets = lesser(quantum, left);
        struct cl_control control = cl_control_message(&message->id);
        control.first_packet = receive->credit.granted + packets;
        if (!cl_peer_list_tell(&endpoint->peers, endpoint->peers.list[message->peer], CL_PACKET_GRANT, control)) {
            cl_timers_arm(&endpoint->timers, &ledger->timer, now_us + WRITE_OFF_US); /* no memory */
            return;
        }
        receive->credit.granted += packets;
        owe(endpoint, receive, packets, now_us);
        cl_ledger_pass_turn(ledger, receive);
        receive = ledger->first;
    }
}

static void begin(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us)
{
    const struct cl_message *message = &receive->message;
    receive->credit.granted = lesser(receive->credit.granted, message->packet_count);
    cl_ledger_add(&endpoint->ledger, receive);
    if (receive->credit.granted > message->packets_arrived)
        owe(endpoint, receive, receive->credit.granted - message->packets_arrived, now_us);
    grant(endpoint, now_us);
}

void cl_credit_on_request(struct cl_endpoint *endpoint, struct cl_receive *receive, uint32_t unscheduled,
                          uint64_t now_us)
{
    if (receive->credit.requested)
        return;
    receive->credit.requested = true;
    receive->credit.granted = unscheduled;
    if (receive->message.posted)
        begin(endpoint, receive, now_us);
}

void cl_credit_posted(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us)
{
    if (receive->credit.requested)
        begin(endpoint, receive, now_us);
}

void cl_credit_arrived(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us)
{
    if (receive->credit.owed == 0)
        return; /* it needed no credit, or that was written off */
    receive->credit.owed--;
    receive->credit.owed_us = now_us;
    endpoint->ledger.owed_bytes -= receive->message.packet_bytes;
    if (receive->credit.owed > 0 && receive->credit.owed <= receive->message.loss_budget)
        cl_timers_arm(&endpoint->timers, &endpoint->ledger.timer, now_us + patience_us(endpoint, receive));
    settle(&endpoint->ledger, receive);
    grant(endpoint, now_us);
}

void cl_credit_leave(struct cl_endpoint *endpoint, struct cl_receive *receive)
{
    if (!receive->credit.listed)
        return;
    write_off(&endpoint->ledger, receive);
    cl_ledger_remove(&endpoint->ledger, receive);
    /* what is free now is granted with the next packet, or by the timer */
    cl_timers_arm(&endpoint->timers, &endpoint->ledger.timer, endpoint->awake_us);
}

void cl_credit_expire(struct cl_endpoint *endpoint, uint64_t now_us)
{
    struct cl_ledger *ledger = &endpoint->ledger;
    uint64_t next_us = UINT64_MAX;
    for (struct cl_receive *receive = ledger->first, *next; receive != NULL; receive = next) {
        next = receive->credit.next;
        uint64_t late_us = receive->credit.owed_us + patience_us(endpoint, receive);
        if (receive->credit.owed > 0 && late_us <= now_us) {
            write_off(ledger, receive);
            settle(ledger, receive);
        } else if (receive->credit.owed > 0 && late_us < next_us) {
            next_us = late_us;
        }
    }
    cl_timers_arm(&endpoint->timers, &ledger->timer, next_us);
    grant(endpoint, now_us);
}
