/*
 * fixed: a constant rate per path, for networks whose rate is known and reserved. The window only bounds what is in
 * flight towards a peer that does not answer.
 */
#include "congestion/cc.h"

enum { WINDOW_US = 200000, WINDOW_PACKETS_MIN = 32 };

static void init(struct cl_cc *cc)
{
    uint64_t timed = cc->rate * WINDOW_US / 1000000;
    uint64_t least = (uint64_t)WINDOW_PACKETS_MIN * cc->packet_bytes;
    cc->window = timed > least ? timed : least;
}

static void on_acked(struct cl_cc *cc, const struct cl_cc_sample *sample)
{
    (void)cc;
    (void)sample;
}

static void on_lost(struct cl_cc *cc, uint32_t packets)
{
    (void)cc;
    (void)packets;
}

static void on_pto(struct cl_cc *cc, uint32_t count)
{
    (void)cc;
    (void)count;
}

const struct cl_cc_type cl_cc_type_fixed = {"fixed", false, init, on_acked, on_lost, on_pto};
