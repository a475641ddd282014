#include "protocol/path.h"

void cl_path_init(struct cl_path *path, uint16_t index, struct cl_nic *nic, uint32_t datagram_bytes)
{
    static const struct cl_outbox_port NEVER_FULL;
    *path = (struct cl_path){.index = index, .ping = true, .nic = nic, .port = &NEVER_FULL};
    cl_rtt_init(&path->rtt);
    cl_loss_init(&path->loss);
    cl_ack_init(&path->ack);
    cl_mtu_init(&path->mtu, datagram_bytes);
    cl_congestion_init(&path->congestion, &nic->congestion, datagram_bytes);
}

void cl_path_free(struct cl_path *path)
{
    cl_sent_free(&path->sent);
    cl_ack_free(&path->ack);
    cl_fragments_free(&path->fragments);
}

void cl_path_begin_anew(struct cl_path *path, uint32_t datagram_bytes)
{
    struct cl_path former = *path;
    cl_congestion_leave(&path->congestion);
    cl_path_free(path);
    cl_path_init(path, former.index, former.nic, datagram_bytes);
    path->port = former.port;
    path->paused = former.paused;
    path->packets_before = former.packets_before + former.sent.next;
    path->packets_lost = former.packets_lost;
    path->packets_received = former.packets_received;
    path->heard_us = former.heard_us;
    path->deaths = former.deaths;
}

bool cl_path_open(const struct cl_path *path, uint8_t class, uint32_t bytes)
{
    struct cl_congestion_flight flight = {.own = path->sent.class_bytes[class], .all = path->sent.bytes};
    for (int i = 0; i <= class; i++)
        flight.urgent += path->sent.class_bytes[i];
    return cl_congestion_has_room(&path->congestion, class, &flight, bytes);
}

bool cl_path_asks(struct cl_path *path, uint8_t class, uint32_t bytes)
{
    uint32_t every = class == CL_CLASS_YIELDS ? CL_PATH_ACK_EVERY_YIELDS : CL_PATH_ACK_EVERY_MAX;
    uint32_t parts = cl_congestion_is_contested(&path->congestion) ? CL_PATH_ACKS_CONTESTED : CL_PATH_ACKS;
    bool asks = ++path->unasked >= every || path->unasked > path->sent.packets / parts;
    /* a full window in which no packet asks for an acknowledgement would wait for the receiver's timer */
    if (!asks && !cl_path_open(path, class, bytes))
        asks = path->loss.any_acked && path->asked <= path->loss.largest_acked[0];
    if (asks) {
        path->unasked = 0;
        path->asked = path->sent.next;
    }
    return asks;
}

/* Takes the packets of `range` out of flight, giving each to `taken`. */
static void take(struct cl_path *path, const struct cl_range *range, cl_loss_fn taken, void *argument,
                 struct cl_congestion_ack *ack)
{
    uint64_t number = range->start > path->sent.low ? range->start : path->sent.low;
    for (; number < range->end; number++) {
        const struct cl_sent_packet *found = cl_sent_find(&path->sent, number);
        if (found == NULL)
            continue;
        struct cl_sent_packet packet = *found;
        cl_sent_remove(&path->sent, number);
        cl_loss_on_acked(&path->loss, number, packet.class);
        cl_mtu_on_came(&path->mtu, packet.sent_us, packet.datagram_bytes);
        ack->bytes += packet.bytes;
        ack->yielding += packet.class == CL_CLASS_YIELDS ? packet.bytes : 0;
        ack->packets++;
        taken(argument, &packet);
    }
}

struct losses {
    struct cl_path *path;
    const struct cl_path_callbacks *callbacks;
    uint32_t packets; /* too large ones are not counted: they say nothing about congestion */
};

static void count_lost(void *argument, const struct cl_sent_packet *packet)
{
    struct losses *losses = argument;
    losses->packets += packet->datagram_bytes <= losses->path->mtu.limit;
    cl_mtu_on_lost(&losses->path->mtu, packet->sent_us, packet->datagram_bytes);
    losses->callbacks->lost(losses->callbacks->argument, packet);
}

void cl_path_detect_losses(struct cl_path *path, uint64_t now_us, const struct cl_path_callbacks *callbacks)
{
    struct losses losses = {.path = path, .callbacks = callbacks};
    cl_loss_detect(&path->loss, &path->sent, &path->rtt, now_us, count_lost, &losses);
    cl_mtu_judge(&path->mtu, now_us);
    if (!losses.packets)
        return;
    path->packets_lost += losses.packets;
    cl_loss_count(&path->loss, 0, losses.packets);
    cl_congestion_lost(&path->congestion, losses.packets);
}

void cl_path_give_up(struct cl_path *path, uint64_t now_us, const struct cl_path_callbacks *callbacks)
{
    struct losses losses = {.path = path, .callbacks = callbacks};
    path->dead = true;
    path->deaths++;
    path->probe = false;
    path->next_probe_us = now_us; /* at once: the path may only have had bad luck */
    path->packets_lost += path->sent.packets;
    cl_loss_give_up(&path->loss, &path->sent, count_lost, &losses);
}

void cl_path_probe_mtu(struct cl_path *path, bool active, uint64_t now_us)
{
    uint64_t wait_us = 2 * ((uint64_t)path->rtt.smoothed_us + 4 * (uint64_t)path->rtt.variation_us);
    if (!active)
        cl_mtu_postpone(&path->mtu, UINT64_MAX);
    else if (path->dead || cl_path_is_full(path))
        cl_mtu_postpone(&path->mtu, now_us + CL_MTU_POSTPONE_US);
    else
        path->padded_ping = cl_mtu_probe(&path->mtu, wait_us, now_us);
}

/* Where switches let urgent packets overtake, the largest number is mostly that of an urgent packet, which says nothing
 * about the queue of the others. A packet that was overtaken is acknowledged at once: it came when the acknowledgement
 * was made. */
static const struct cl_sent_packet *find_overtaken(const struct cl_sent *sent, struct cl_ack_frame *frame)
{
    for (uint32_t i = 0; i < frame->came_count && frame->came[i].end > sent->low; i++)
        for (uint64_t number = frame->came[i].end; number-- > frame->came[i].start && number >= sent->low;) {
            const struct cl_sent_packet *packet = cl_sent_find(sent, number);
            if (packet == NULL)
                continue;
            frame->clock_us += frame->host_delay_us;
            frame->host_delay_us = 0;
            return packet;
        }
    return NULL;
}

bool cl_path_on_ack(struct cl_path *path, const struct cl_packet *packet, const uint8_t *payload, uint64_t received_us,
                    uint64_t now_us, const struct cl_path_callbacks *callbacks)
{
    struct cl_ack_frame frame;
    if (!cl_ack_read(&frame, packet, payload, path->sent.next))
        return false;
    struct cl_congestion_ack ack = {.largest = frame.largest,
                                    .next = path->sent.next,
                                    .limited = frame.largest < path->limited_until,
                                    .yields_limited = frame.largest < path->yields_limited_until,
                                    .port_rate = frame.port_rate,
                                    .port_senders = frame.port_senders};
    const struct cl_sent_packet *timed = cl_sent_find(&path->sent, frame.largest);
    bool overtaken = timed == NULL && cl_congestion_nic_is_mixed(&path->nic->congestion, now_us);
    if (overtaken)
        timed = find_overtaken(&path->sent, &frame);
    if (timed != NULL) {
        cl_rtt_update(&path->rtt, timed->sent_us, received_us, frame.clock_us, frame.host_delay_us);
        ack.timing = (struct cl_congestion_timing){.known = true,
                                                   .class = timed->class,
                                                   .overtaken = overtaken,
                                                   .packet = timed->congestion,
                                                   .sent_us = timed->sent_us,
                                                   .clock_us = frame.clock_us,
                                                   .queue_us = path->rtt.queue_us,
                                                   .base_us = cl_rtt_base_us(&path->rtt)};
    }

    cl_loss_on_frame(&path->loss, &frame, callbacks->late, callbacks->argument);
    for (uint32_t i = 0; i < frame.refused_count; i++)
        take(path, &frame.refused[i], callbacks->refused, callbacks->argument, &ack);
    for (uint32_t i = 0; i < frame.came_count; i++)
        take(path, &frame.came[i], callbacks->acked, callbacks->argument, &ack);
    if (!ack.packets)
        return true;
    uint32_t marked = (uint32_t)(frame.marked - path->marked) % CL_ACK_MARKS;
    if (marked < CL_ACK_MARKS / 2) { /* else this acknowledgement is older than the last one */
        ack.marked = marked;
        path->marked = frame.marked;
    }
    path->loss.pto_count = 0;
    path->probe = false;
    path->dead = false;
    path->delivered_us = now_us;
    cl_loss_count(&path->loss, ack.packets, 0);
    cl_congestion_acknowledged(&path->congestion, &ack, now_us);
    cl_path_detect_losses(path, now_us, callbacks);
    return true;
}

uint64_t cl_path_pto_us(const struct cl_path *path)
{
    bool probes = path->probe && !cl_path_is_full(path);
    return path->dead || probes ? UINT64_MAX : cl_loss_pto_us(&path->loss, &path->sent, &path->rtt);
}

void cl_path_on_pto(struct cl_path *path, uint64_t now_us)
{
    path->loss.pto_count++;
    path->probe = true;
    if (cl_path_is_full(path))
        path->sent.last_sent_us = now_us; /* the probe has to wait, the timer goes on: the path may be dead */
    cl_congestion_timeout(&path->congestion, path->loss.pto_count);
}

void cl_path_read(const struct cl_path *path, struct cl_path_stats *stats)
{
    struct cl_congestion_report report = cl_congestion_report(&path->congestion);
    *stats = (struct cl_path_stats){.packets_sent = path->packets_before + path->sent.next,
                                    .packets_lost = path->packets_lost,
                                    .packets_received = path->packets_received,
                                    .window_bytes = report.window_bytes,
                                    .round_trip_us = path->rtt.smoothed_us,
                                    .queue_us = report.queue_us,
                                    .is_dead = path->dead,
                                    .is_answered = path->delivered_us > 0,
                                    .rate_bytes = report.rate_bytes,
                                    .deaths = path->deaths,
                                    .heard_us = path->heard_us,
                                    .datagram_bytes = path->mtu.limit,
                                    .capacity_bytes = report.capacity_bytes,
                                    .carried_bytes = report.carried_bytes,
                                    .delivered_bytes = report.delivered_bytes,
                                    .arrived_bytes = report.arrived_bytes};
}

uint64_t cl_path_repeat_us(const struct cl_path *path)
{
    if (path->loss.share < CL_PATH_REPEAT_LOSS || path->repeated >= path->sent.next || path->dead ||
        cl_path_is_full(path) || path->sent.packets == path->sent.pings)
        return UINT64_MAX;
    uint32_t round_trip_us = cl_rtt_base_us(&path->rtt);
    if (round_trip_us < CL_PATH_REPEAT_ROUND_TRIP_US || cl_congestion_is_contested(&path->congestion))
        return UINT64_MAX;
    return path->sent.last_sent_us + round_trip_us / CL_PATH_REPEAT_PAUSE;
}

uint64_t cl_path_deadline_us(const struct cl_path *path)
{
    uint64_t deadline_us = cl_path_is_full(path) ? UINT64_MAX : path->ack.deadline_us;
    if (path->loss.deadline_us < deadline_us)
        deadline_us = path->loss.deadline_us;
    uint64_t pto_us = cl_path_pto_us(path);
    if (pto_us < deadline_us)
        deadline_us = pto_us;
    if (path->dead && path->next_probe_us < deadline_us)
        deadline_us = path->next_probe_us;
    if (path->mtu.next_us < deadline_us)
        deadline_us = path->mtu.next_us;
    uint64_t repeat_us = cl_path_repeat_us(path);
    if (repeat_us < deadline_us)
        deadline_us = repeat_us;
    return deadline_us;
}
