#include "core/egress.h"

enum { START_FACTOR = 2 /* initial window, in initial windows of one path */ };

void cl_egress_init(struct cl_egress *egress, const struct cl_cc_type *type, uint32_t datagram_bytes,
                    uint64_t fixed_rate)
{
    *egress = (struct cl_egress){.round_queue_us = UINT32_MAX};
    cl_cc_init(&egress->cc, type->name, datagram_bytes, fixed_rate);
    if (type->shares_egress)
        egress->cc.window *= START_FACTOR;
    else
        egress->cc.window = UINT64_MAX;
}

void cl_egress_limit(struct cl_egress *egress) { egress->limited_until = egress->flight.sent; }

void cl_egress_on_acked(struct cl_egress *egress, struct cl_cc_sample *sample, uint64_t now_us)
{
    if (!egress->cc.type->shares_egress)
        return;
    if (sample->timed && sample->queue_us < egress->round_queue_us)
        egress->round_queue_us = sample->queue_us;
    if (egress->round_queue_us < egress->queue_us)
        egress->queue_us = egress->round_queue_us;
    if (egress->flight.settled >= egress->round_end) {
        if (egress->round_queue_us != UINT32_MAX)
            egress->queue_us = egress->round_queue_us;
        egress->round_queue_us = UINT32_MAX;
        egress->round_end = egress->flight.sent;
    }
    struct cl_cc_sample common = *sample;
    common.largest = egress->flight.settled;
    common.next = egress->flight.sent;
    common.limited = egress->flight.settled < egress->limited_until + sample->packets;
    common.queue_us = egress->queue_us;
    egress->cc.type->on_acked(&egress->cc, &common, now_us);
    sample->queue_us -= sample->queue_us < egress->queue_us ? sample->queue_us : egress->queue_us;
}

void cl_egress_on_lost(struct cl_egress *egress, uint64_t bytes, uint32_t packets, uint64_t now_us)
{
    if (egress->cc.type->shares_egress)
        egress->cc.type->on_lost(&egress->cc, bytes, packets, egress->flight.sent, now_us);
}
