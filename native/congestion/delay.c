#include "congestion/delay.h"

enum {
    CROWD_US = 1000000, /* hosts that sent to the peer so long ago may do so again */
    BURST_PACKETS = 8,  /* of another rank of this host, in the queue of the interface */
};

static struct cl_delay_nic *nic_of(const struct cl_rate_control *control)
{
    return (struct cl_delay_nic *)(void *)control->nic; /* its first member */
}

static void nic_init(struct cl_rate_control_nic *nic, uint32_t datagram_bytes)
{
    struct cl_delay_nic *made = (struct cl_delay_nic *)(void *)nic; /* its first member */
    made->ingress = (struct cl_ingress){0};
    cl_egress_init(&made->egress, datagram_bytes);
}

static void init(struct cl_rate_control *control, uint32_t datagram_bytes)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    *delay = (struct cl_delay){.control = *control};
    cl_cc_init(&delay->cc, datagram_bytes);
    cl_contest_init(&delay->contest, datagram_bytes);
    cl_scavenger_init(&delay->scavenger, datagram_bytes);
    cl_pacer_init(&delay->pacer, 0, (uint64_t)CL_PACER_BURST_PACKETS * datagram_bytes, 0);
}

static void finished(struct cl_rate_control *control)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    cl_active_set_leave(&nic_of(control)->ingress.senders, &delay->sender);
}

static void leave(struct cl_rate_control *control)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    cl_active_set_leave(&nic_of(control)->egress.receivers, &delay->receiver);
    finished(control);
}

/* ---- events ---- */

static struct cl_congestion_packet remember(const struct cl_rate_control *control, uint8_t class, uint64_t now_us)
{
    return (struct cl_congestion_packet){cl_egress_snapshot(&nic_of(control)->egress, class, now_us)};
}

static void sent(struct cl_rate_control *control, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    struct cl_egress *egress = &nic_of(control)->egress;
    if (class != CL_CLASS_YIELDS) /* it has a window of its own */
        cl_pacer_sent(&delay->pacer, bytes);
    cl_egress_sent(egress, class, bytes);
    cl_egress_see(egress, class, first_class, bytes, now_us);
    cl_active_set_see(&egress->receivers, &delay->receiver, now_us);
}

static bool nic_heard(struct cl_rate_control_nic *nic, uint64_t now_us)
{
    return cl_egress_heard(&((struct cl_delay_nic *)(void *)nic)->egress, now_us); /* its first member */
}

static struct cl_told nic_tell(const struct cl_rate_control_nic *nic)
{
    return cl_egress_tell(&((const struct cl_delay_nic *)(const void *)nic)->egress); /* its first member */
}

static void nic_hear(struct cl_rate_control_nic *nic, uint32_t neighbour, const struct cl_told *told, uint64_t now_us)
{
    cl_egress_hear(&((struct cl_delay_nic *)(void *)nic)->egress, neighbour, told, now_us); /* its first member */
}

static void sent_control(struct cl_rate_control *control, uint32_t bytes)
{
    cl_egress_sent(&nic_of(control)->egress, 0, bytes);
}

/* Whether the path shares neither its interface with another one of this process nor the receiver's port. */
static bool is_alone(const struct cl_delay *delay, uint64_t now_us)
{
    return cl_egress_receivers(&nic_of(&delay->control)->egress, now_us) < 2 && now_us > delay->crowd_us + CROWD_US;
}

/* The queue that this job keeps on purpose: `target_us` in front of the interface, on which a packet takes `packet_us`.
 * Where paths share an interface or a port, their windows keep some as well. Other ranks of this host keep no windows'
 * queue beyond the common target, but each may have a burst there. Urgent packets shorten the target at once, but not
 * the queue, which takes its time to drain: the usual target counts. */
static uint32_t kept_us(const struct cl_delay *delay, double target_us, double packet_us, uint64_t now_us)
{
    const struct cl_egress *egress = &nic_of(&delay->control)->egress;
    double bursts_us = egress->neighbours.recent * BURST_PACKETS * packet_us;
    uint32_t beyond_us = is_alone(delay, now_us) ? 0 : cl_cc_target_us(&delay->cc, (uint32_t)packet_us);
    return (uint32_t)(target_us + bursts_us) + beyond_us;
}

/* The same when no other flow takes a part of the link. Beside one, the measured capacity goes down, packets seem to
 * take longer, and the target, which counts packets, becomes as long as the queue of the other flow. A rank that is
 * alone on its host has found the other flow by then. Several ranks wait longer: QUEUED_KEPT_SHARED in contest.c. */
static uint32_t kept_alone_us(const struct cl_delay *delay, uint64_t now_us)
{
    const struct cl_egress *egress = &nic_of(&delay->control)->egress;
    if (egress->neighbours.recent == 0)
        return kept_us(delay, cl_egress_target_us(egress), cl_egress_packet_us(egress), now_us);
    return kept_us(delay, cl_egress_target_alone_us(egress), cl_egress_fastest_packet_us(egress), now_us);
}

/* Does another flow fill the queue? Traffic that yields does not ask: it has a window of its own. */
static void judge_contest(struct cl_delay *delay, const struct cl_congestion_ack *ack, uint64_t now_us)
{
    if (ack->yielding == ack->bytes)
        return;
    struct cl_egress *egress = &nic_of(&delay->control)->egress;
    const struct cl_congestion_timing *timing = &ack->timing;
    uint32_t took_us = (uint32_t)(now_us - timing->sent_us), network_us = timing->base_us + timing->queue_us;
    if (ack->port_senders > 1)
        delay->crowd_us = now_us;
    const struct cl_loss_trial *trial = &egress->loss_trial;
    struct cl_contest_sample sample = {
        .bytes = ack->bytes,
        .packets = ack->packets,
        .marked = ack->marked,
        .largest = ack->largest,
        .next = ack->next,
        .senders = ack->port_senders,
        .ranks = egress->neighbours.recent + 1,
        .alone = is_alone(delay, now_us),
        .limited = ack->limited,
        .trial = trial->trial ? trial : &delay->cc.loss_trial,
        .timed = timing->known,
        .queue_us = timing->queue_us,
        .base_us = timing->base_us,
        .host_us = took_us > network_us ? took_us - network_us : 0,
        .kept_us = kept_us(delay, cl_egress_target_us(egress), cl_egress_packet_us(egress), now_us),
        .kept_alone_us = kept_alone_us(delay, now_us)};
    enum cl_contest_news news = cl_contest_on_acked(&delay->contest, &sample, now_us);
    if (news == CL_CONTEST_OVERFLOWED)
        cl_egress_overflowed(egress, now_us);
    else if (news == CL_CONTEST_ENDED)
        cl_cc_resume(&delay->cc, cl_contest_window(&delay->contest));
}

static uint64_t lesser(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void acknowledged(struct cl_rate_control *control, const struct cl_congestion_ack *ack, uint64_t now_us)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    struct cl_egress *egress = &nic_of(control)->egress;
    struct cl_cc_sample sample = {.bytes = ack->bytes,
                                  .packets = ack->packets,
                                  .marked = ack->marked,
                                  .largest = ack->largest,
                                  .next = ack->next,
                                  .limited = ack->limited};
    /* a share of the port that this interface does not carry would only fill its own queue */
    if (ack->port_senders > 0)
        sample.share = lesser((uint64_t)ack->port_rate * 1000 / ack->port_senders, (uint64_t)cl_egress_rate(egress));
    sample.crowded = ack->port_senders > 1 && sample.share && ack->port_senders > cl_egress_receivers(egress, now_us);
    const struct cl_congestion_timing *timing = &ack->timing;
    judge_contest(delay, ack, now_us);
    sample.contested = delay->contest.active;
    if (timing->known) {
        struct cl_egress_sample left = {.class = timing->class,
                                        .overtaken = timing->overtaken,
                                        .crowded = sample.crowded || delay->contest.active,
                                        .snapshot = timing->packet.egress,
                                        .sent_us = timing->sent_us,
                                        .clock_us = timing->clock_us,
                                        .queue_us = timing->queue_us,
                                        .round_trip_us = timing->base_us + timing->queue_us};
        sample.timed = true;
        sample.queue_us = cl_egress_on_sample(egress, &delay->view, &left, now_us);
        sample.base_us = timing->base_us;
    }
    sample.packet_us = (uint32_t)cl_egress_packet_us(egress);
    egress->marked |= ack->marked > 0;
    cl_egress_on_settled(egress, ack->packets, 0);
    cl_cc_on_acked(&delay->cc, &sample);
    cl_scavenger_on_acked(&delay->scavenger, &(struct cl_scavenger_sample){.bytes = ack->yielding,
                                                                           .largest = ack->largest,
                                                                           .next = ack->next,
                                                                           .limited = ack->yields_limited,
                                                                           .marked = ack->marked > 0,
                                                                           .timed = timing->known,
                                                                           .queue_us = timing->queue_us,
                                                                           .packet_us = sample.packet_us});
    if (delay->contest.active)
        cl_pacer_set(&delay->pacer, cl_contest_rate(&delay->contest), cl_contest_burst(&delay->contest), now_us);
    else if (delay->cc.rate != delay->pacer.rate)
        cl_pacer_set(&delay->pacer, delay->cc.rate, delay->cc.burst, now_us);
}

static void lost(struct cl_rate_control *control, uint32_t packets)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    cl_egress_on_settled(&nic_of(control)->egress, 0, packets);
    cl_cc_on_lost(&delay->cc, packets);
    cl_contest_on_lost(&delay->contest, packets);
    cl_scavenger_on_lost(&delay->scavenger);
}

static void timeout(struct cl_rate_control *control, uint32_t count)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    cl_cc_on_pto(&delay->cc, count);
    cl_contest_on_pto(&delay->contest, count);
    cl_scavenger_on_pto(&delay->scavenger, count);
}

static void received(struct cl_rate_control *control, uint32_t bytes, uint64_t received_us)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    cl_ingress_on_packet(&nic_of(control)->ingress, &delay->sender, bytes, received_us);
}

/* ---- may a packet leave? ---- */

static uint64_t window_of(const struct cl_delay *delay)
{
    return delay->contest.active ? cl_contest_window(&delay->contest) : delay->cc.window;
}

static bool has_room(const struct cl_rate_control *control, uint8_t class, const struct cl_congestion_flight *flight,
                     uint32_t bytes)
{
    const struct cl_delay *delay = (const struct cl_delay *)(const void *)control; /* its first member */
    uint64_t window = window_of(delay);
    uint64_t least = (uint64_t)CL_DELAY_URGENT_PACKETS * delay->cc.packet_bytes;
    if (class == CL_CLASS_YIELDS)
        return flight->own + bytes <= cl_scavenger_window(&delay->scavenger);
    if (flight->urgent < flight->all && window < least)
        window = least; /* the less urgent packets filled the queue that made the window so small */
    return flight->urgent + bytes <= window;
}

static uint64_t ready_us(struct cl_rate_control *control, uint8_t class, uint64_t now_us)
{
    struct cl_delay *delay = (struct cl_delay *)(void *)control; /* its first member */
    if (class == CL_CLASS_YIELDS)
        return now_us;
    bool urgent = cl_egress_urgent(&nic_of(control)->egress, class, now_us);
    return cl_pacer_ready_us(&delay->pacer, urgent, now_us);
}

static uint64_t nic_ready_us(struct cl_rate_control_nic *nic, uint8_t class, uint64_t now_us)
{
    struct cl_delay_nic *delay = (struct cl_delay_nic *)(void *)nic; /* its first member */
    return cl_egress_ready_us(&delay->egress, class, now_us);
}

/* ---- questions ---- */

static bool is_contested(const struct cl_rate_control *control)
{
    return ((const struct cl_delay *)(const void *)control)->contest.active; /* its first member */
}

static uint64_t delay_us(const struct cl_rate_control *control)
{
    const struct cl_delay *delay = (const struct cl_delay *)(const void *)control; /* its first member */
    return cl_egress_backlog_us(&nic_of(control)->egress) + delay->cc.queue_us;
}

static uint64_t nic_rate(const struct cl_rate_control_nic *nic)
{
    const struct cl_delay_nic *delay = (const struct cl_delay_nic *)(const void *)nic; /* its first member */
    return (uint64_t)cl_egress_rate(&delay->egress);
}

static uint64_t nic_batch(const struct cl_rate_control_nic *nic, uint64_t now_us)
{
    const struct cl_delay_nic *delay = (const struct cl_delay_nic *)(const void *)nic; /* its first member */
    return cl_egress_batch(&delay->egress, now_us);
}

static bool nic_is_mixed(const struct cl_rate_control_nic *nic, uint64_t now_us)
{
    const struct cl_delay_nic *delay = (const struct cl_delay_nic *)(const void *)nic; /* its first member */
    return now_us < delay->egress.mixed_until_us;
}

static bool nic_has_urgent(const struct cl_rate_control_nic *nic, uint64_t now_us)
{
    const struct cl_delay_nic *delay = (const struct cl_delay_nic *)(const void *)nic; /* its first member */
    return now_us < delay->egress.urgent_until_us;
}

static struct cl_congestion_port nic_port(struct cl_rate_control_nic *nic, uint64_t now_us)
{
    struct cl_ingress *ingress = &((struct cl_delay_nic *)(void *)nic)->ingress; /* its first member */
    return (struct cl_congestion_port){.rate = cl_ingress_rate(ingress),
                                       .senders = cl_active_set_count(&ingress->senders, CL_INGRESS_IDLE_US, now_us)};
}

static void report(const struct cl_rate_control *control, struct cl_congestion_report *report)
{
    const struct cl_delay *delay = (const struct cl_delay *)(const void *)control; /* its first member */
    const struct cl_egress *egress = &nic_of(control)->egress;
    report->window_bytes = window_of(delay);
    report->rate_bytes = delay->pacer.rate;
    report->queue_us = delay->cc.queue_us;
    report->capacity_bytes = (uint64_t)cl_egress_rate(egress);
    report->carried_bytes = egress->own_bytes[CL_CLASSES_BETWEEN_HOSTS - 1];
}

const struct cl_rate_control_type cl_rate_control_delay = {.name = "delay",
                                                           .nic_init = nic_init,
                                                           .init = init,
                                                           .leave = leave,
                                                           .remember = remember,
                                                           .sent = sent,
                                                           .sent_control = sent_control,
                                                           .nic_tell = nic_tell,
                                                           .nic_hear = nic_hear,
                                                           .nic_heard = nic_heard,
                                                           .acknowledged = acknowledged,
                                                           .lost = lost,
                                                           .timeout = timeout,
                                                           .received = received,
                                                           .finished = finished,
                                                           .has_room = has_room,
                                                           .ready_us = ready_us,
                                                           .nic_ready_us = nic_ready_us,
                                                           .is_contested = is_contested,
                                                           .delay_us = delay_us,
                                                           .nic_rate = nic_rate,
                                                           .nic_batch = nic_batch,
                                                           .nic_is_mixed = nic_is_mixed,
                                                           .nic_has_urgent = nic_has_urgent,
                                                           .nic_port = nic_port,
                                                           .report = report};
