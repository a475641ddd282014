#include "congestion/fixed.h"

static void nic_init(struct cl_rate_control_nic *nic, uint32_t datagram_bytes)
{
    (void)datagram_bytes;
    ((struct cl_fixed_nic *)(void *)nic)->carried_bytes = 0; /* its first member */
}

static void init(struct cl_rate_control *control, uint32_t datagram_bytes)
{
    struct cl_fixed *fixed = (struct cl_fixed *)(void *)control; /* its first member */
    fixed->window_bytes = (uint64_t)CL_FIXED_WINDOW_PACKETS * datagram_bytes;
}

static void leave(struct cl_rate_control *control)
{
    (void)control;
}

/* ---- events: only what was sent is counted ---- */

static struct cl_congestion_packet remember(const struct cl_rate_control *control, uint8_t class, uint64_t now_us)
{
    (void)control;
    (void)class;
    (void)now_us;
    return (struct cl_congestion_packet){0};
}

static void sent_control(struct cl_rate_control *control, uint32_t bytes)
{
    ((struct cl_fixed_nic *)(void *)control->nic)->carried_bytes += bytes + CL_EGRESS_OVERHEAD_BYTES; /* its first */
}

static struct cl_told nic_tell(const struct cl_rate_control_nic *nic)
{
    (void)nic;
    return (struct cl_told){0};
}

static bool nic_heard(struct cl_rate_control_nic *nic, uint64_t now_us)
{
    (void)nic;
    (void)now_us;
    return false;
}

static void nic_hear(struct cl_rate_control_nic *nic, uint32_t neighbour, const struct cl_told *told, uint64_t now_us)
{
    (void)nic;
    (void)neighbour;
    (void)told;
    (void)now_us;
}

static void sent(struct cl_rate_control *control, uint8_t class, uint8_t first_class, uint32_t bytes, uint64_t now_us)
{
    (void)class;
    (void)first_class;
    (void)now_us;
    sent_control(control, bytes);
}

static void acknowledged(struct cl_rate_control *control, const struct cl_congestion_ack *ack, uint64_t now_us)
{
    (void)control;
    (void)ack;
    (void)now_us;
}

static void count(struct cl_rate_control *control, uint32_t packets_or_timeouts)
{
    (void)control;
    (void)packets_or_timeouts;
}

static void received(struct cl_rate_control *control, uint32_t bytes, uint64_t received_us)
{
    (void)control;
    (void)bytes;
    (void)received_us;
}

/* ---- may a packet leave? ---- */

static bool has_room(const struct cl_rate_control *control, uint8_t class, const struct cl_congestion_flight *flight,
                     uint32_t bytes)
{
    (void)class;
    return flight->urgent + bytes <=
           ((const struct cl_fixed *)(const void *)control)->window_bytes; /* its first member */
}

static uint64_t ready_us(struct cl_rate_control *control, uint8_t class, uint64_t now_us)
{
    (void)control;
    (void)class;
    return now_us;
}

static uint64_t nic_ready_us(struct cl_rate_control_nic *nic, uint8_t class, uint64_t now_us)
{
    (void)nic;
    (void)class;
    return now_us;
}

/* ---- questions: it has measured nothing ---- */

static bool is_contested(const struct cl_rate_control *control)
{
    (void)control;
    return false;
}

static uint64_t delay_us(const struct cl_rate_control *control)
{
    (void)control;
    return 0;
}

static uint64_t nic_rate(const struct cl_rate_control_nic *nic)
{
    (void)nic;
    return 0;
}

static uint64_t nic_batch(const struct cl_rate_control_nic *nic, uint64_t now_us)
{
    (void)nic;
    (void)now_us;
    return 0;
}

static bool never(const struct cl_rate_control_nic *nic, uint64_t now_us)
{
    (void)nic;
    (void)now_us;
    return false;
}

static struct cl_congestion_port nic_port(struct cl_rate_control_nic *nic, uint64_t now_us)
{
    (void)nic;
    (void)now_us;
    return (struct cl_congestion_port){0};
}

static void report(const struct cl_rate_control *control, struct cl_congestion_report *report)
{
    report->window_bytes = ((const struct cl_fixed *)(const void *)control)->window_bytes;            /* its first */
    report->carried_bytes = ((const struct cl_fixed_nic *)(const void *)control->nic)->carried_bytes; /* the same */
}

const struct cl_rate_control_type cl_rate_control_fixed = {.name = "fixed",
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
                                                           .lost = count,
                                                           .timeout = count,
                                                           .received = received,
                                                           .finished = leave,
                                                           .has_room = has_room,
                                                           .ready_us = ready_us,
                                                           .nic_ready_us = nic_ready_us,
                                                           .is_contested = is_contested,
                                                           .delay_us = delay_us,
                                                           .nic_rate = nic_rate,
                                                           .nic_batch = nic_batch,
                                                           .nic_is_mixed = never,
                                                           .nic_has_urgent = never,
                                                           .nic_port = nic_port,
                                                           .report = report};
