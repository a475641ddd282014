#include "congestion/congestion.h"

void cl_congestion_nic_init(struct cl_congestion_nic *nic, uint32_t datagram_bytes)
{
    *nic = (struct cl_congestion_nic){0};
    cl_egress_init(&nic->egress, datagram_bytes);
}

void cl_congestion_init(struct cl_congestion *congestion, struct cl_congestion_nic *nic, uint32_t datagram_bytes)
{
    *congestion = (struct cl_congestion){.nic = nic};
    cl_cc_init(&congestion->cc, datagram_bytes);
    cl_pacer_init(&congestion->pacer, 0, (uint64_t)CL_PACER_BURST_PACKETS * datagram_bytes, 0);
}

void cl_congestion_leave(struct cl_congestion *congestion)
{
    cl_active_set_leave(&congestion->nic->egress.receivers, &congestion->receiver);
    cl_congestion_finished(congestion);
}

/* ---- events ---- */

struct cl_congestion_packet cl_congestion_remember(const struct cl_congestion *congestion, uint8_t class,
                                                   uint64_t now_us)
{
    return (struct cl_congestion_packet){cl_egress_snapshot(&congestion->nic->egress, class, now_us)};
}

void cl_congestion_sent(struct cl_congestion *congestion, uint8_t class, uint8_t first_class, uint32_t bytes,
                        uint64_t now_us)
{
    struct cl_egress *egress = &congestion->nic->egress;
    cl_pacer_sent(&congestion->pacer, bytes);
    cl_egress_sent(egress, class, bytes);
    cl_egress_see(egress, class, first_class, bytes, now_us);
    cl_active_set_see(&egress->receivers, &congestion->receiver, now_us);
}

void cl_congestion_sent_control(struct cl_congestion *congestion, uint32_t bytes)
{
    cl_egress_sent(&congestion->nic->egress, 0, bytes);
}

void cl_congestion_acknowledged(struct cl_congestion *congestion, const struct cl_congestion_ack *ack, uint64_t now_us)
{
    struct cl_egress *egress = &congestion->nic->egress;
    struct cl_cc_sample sample = {.bytes = ack->bytes,
                                  .packets = ack->packets,
                                  .marked = ack->marked,
                                  .largest = ack->largest,
                                  .next = ack->next,
                                  .limited = ack->limited};
    if (ack->port_senders > 0)
        sample.share = (uint64_t)ack->port_rate * 1000 / ack->port_senders;
    sample.crowded = ack->port_senders > 1 && sample.share && ack->port_senders > cl_egress_receivers(egress, now_us);
    const struct cl_congestion_timing *timing = &ack->timing;
    if (timing->known) {
        struct cl_egress_sample left = {.class = timing->class,
                                        .overtaken = timing->overtaken,
                                        .crowded = sample.crowded,
                                        .snapshot = timing->packet.egress,
                                        .sent_us = timing->sent_us,
                                        .clock_us = timing->clock_us,
                                        .queue_us = timing->queue_us};
        sample.timed = true;
        sample.packet_us = (uint32_t)cl_egress_packet_us(egress);
        sample.queue_us = cl_egress_on_sample(egress, &congestion->view, &left, now_us);
        sample.base_us = timing->base_us;
    }
    cl_peak_see(&congestion->nic->delivered, ack->bytes, now_us);
    egress->marked |= ack->marked > 0;
    cl_egress_on_settled(egress, ack->packets, 0);
    cl_cc_on_acked(&congestion->cc, &sample);
    if (congestion->cc.rate != congestion->pacer.rate)
        cl_pacer_set(&congestion->pacer, congestion->cc.rate, congestion->cc.burst, now_us);
}

void cl_congestion_lost(struct cl_congestion *congestion, uint32_t packets)
{
    cl_egress_on_settled(&congestion->nic->egress, 0, packets);
    cl_cc_on_lost(&congestion->cc, packets);
}

void cl_congestion_timeout(struct cl_congestion *congestion, uint32_t count)
{
    cl_cc_on_pto(&congestion->cc, count);
}

void cl_congestion_received(struct cl_congestion *congestion, uint32_t bytes, uint64_t received_us)
{
    cl_ingress_on_packet(&congestion->nic->ingress, &congestion->sender, bytes, received_us);
    cl_peak_see(&congestion->nic->arrived, bytes, received_us);
}

void cl_congestion_finished(struct cl_congestion *congestion)
{
    cl_active_set_leave(&congestion->nic->ingress.senders, &congestion->sender);
}

/* ---- may a packet leave? ---- */

bool cl_congestion_has_room(const struct cl_congestion *congestion, uint64_t urgent, uint64_t in_flight, uint32_t bytes)
{
    uint64_t window = congestion->cc.window;
    uint64_t least = (uint64_t)CL_CONGESTION_URGENT_PACKETS * congestion->cc.packet_bytes;
    if (urgent < in_flight && window < least)
        window = least; /* the less urgent packets filled the queue that made the window so small */
    return urgent + bytes <= window;
}

uint64_t cl_congestion_ready_us(struct cl_congestion *congestion, uint8_t class, uint64_t now_us)
{
    bool urgent = cl_egress_urgent(&congestion->nic->egress, class, now_us);
    return cl_pacer_ready_us(&congestion->pacer, urgent, now_us);
}

uint64_t cl_congestion_nic_ready_us(struct cl_congestion_nic *nic, uint8_t class, uint64_t now_us)
{
    return cl_egress_ready_us(&nic->egress, class, now_us);
}

/* ---- questions ---- */

uint64_t cl_congestion_delay_us(const struct cl_congestion *congestion)
{
    return cl_egress_backlog_us(&congestion->nic->egress) + congestion->cc.queue_us;
}

uint64_t cl_congestion_nic_rate(const struct cl_congestion_nic *nic)
{
    return (uint64_t)nic->egress.capacity;
}

bool cl_congestion_nic_is_mixed(const struct cl_congestion_nic *nic, uint64_t now_us)
{
    return now_us < nic->egress.mixed_until_us;
}

bool cl_congestion_nic_has_urgent(const struct cl_congestion_nic *nic, uint64_t now_us)
{
    return now_us < nic->egress.urgent_until_us;
}

struct cl_congestion_port cl_congestion_nic_port(struct cl_congestion_nic *nic, uint64_t now_us)
{
    return (struct cl_congestion_port){.rate = cl_ingress_rate(&nic->ingress),
                                       .senders =
                                           cl_active_set_count(&nic->ingress.senders, CL_INGRESS_IDLE_US, now_us)};
}

struct cl_congestion_report cl_congestion_report(const struct cl_congestion *congestion)
{
    const struct cl_egress *egress = &congestion->nic->egress;
    return (struct cl_congestion_report){.window_bytes = congestion->cc.window,
                                         .rate_bytes = congestion->pacer.rate,
                                         .queue_us = congestion->cc.queue_us,
                                         .capacity_bytes = (uint64_t)egress->capacity,
                                         .carried_bytes = egress->bytes[CL_CLASSES - 1],
                                         .delivered_bytes = cl_peak_rate(&congestion->nic->delivered),
                                         .arrived_bytes = cl_peak_rate(&congestion->nic->arrived)};
}
