#include "protocol/rtt.h"

static int64_t least(const struct cl_minimum *minimum)
{
    int64_t value = minimum->value[0];
    for (int i = 1; i < CL_RTT_BUCKETS; i++)
        if (minimum->value[i] < value)
            value = minimum->value[i];
    return value;
}

int64_t cl_minimum_update(struct cl_minimum *minimum, int64_t value, uint64_t now_us)
{
    uint64_t bucket = now_us / CL_RTT_BUCKET_US;
    if (!minimum->any || bucket >= minimum->bucket + CL_RTT_BUCKETS) {
        int64_t before = minimum->any ? least(minimum) : value;
        for (int i = 0; i < CL_RTT_BUCKETS; i++)
            minimum->value[i] = value;
        minimum->value[(bucket + CL_RTT_BUCKETS - 1) % CL_RTT_BUCKETS] = before;
        minimum->any = true;
        minimum->bucket = bucket;
    }
    while (minimum->bucket < bucket)
        minimum->value[++minimum->bucket % CL_RTT_BUCKETS] = value;
    int64_t *current = &minimum->value[minimum->bucket % CL_RTT_BUCKETS];
    if (value < *current)
        *current = value;
    return least(minimum);
}

void cl_rtt_init(struct cl_rtt *rtt)
{
    *rtt = (struct cl_rtt){.smoothed_us = CL_RTT_INITIAL_US, .variation_us = CL_RTT_INITIAL_US / 2};
}

static uint32_t distance(uint32_t a, uint32_t b)
{
    return a > b ? a - b : b - a;
}

static uint32_t weigh(uint32_t average, uint32_t sample, uint32_t weight)
{
    return (uint32_t)(((weight - 1) * (uint64_t)average + sample) / weight);
}

void cl_rtt_update(struct cl_rtt *rtt, uint64_t sent_us, uint64_t received_us, uint32_t peer_clock_us,
                   uint32_t host_delay_us)
{
    uint32_t whole_us = received_us > sent_us ? (uint32_t)(received_us - sent_us) : 0;
    rtt->latest_us = whole_us;
    uint32_t change_us = distance(rtt->smoothed_us, whole_us);
    if (!rtt->any) {
        rtt->smoothed_us = whole_us;
        rtt->variation_us = whole_us / 2;
    } else if (whole_us < rtt->smoothed_us) {
        /* a queue has drained: follow quickly, without raising the variation */
        rtt->variation_us = weigh(rtt->variation_us, change_us, 16);
        rtt->smoothed_us = weigh(rtt->smoothed_us, whole_us, 4);
    } else {
        rtt->variation_us = weigh(rtt->variation_us, change_us, 4);
        rtt->smoothed_us = weigh(rtt->smoothed_us, whole_us, 8);
    }
    rtt->host_us = rtt->any ? weigh(rtt->host_us, host_delay_us, 8) : host_delay_us;
    rtt->any = true;

    int64_t network_us = whole_us > host_delay_us ? whole_us - host_delay_us : 0;
    int64_t network_queue_us = network_us - cl_minimum_update(&rtt->network, network_us, received_us);

    /* The difference of the two clocks is known modulo 2^32 us. It is continued from the minimum, so that it never
     * jumps. */
    uint32_t difference = peer_clock_us - (uint32_t)sent_us;
    int64_t near_us = rtt->one_way.any ? least(&rtt->one_way) : (int32_t)difference;
    int64_t one_way_us = near_us + (int32_t)(difference - (uint32_t)near_us);
    int64_t one_way_queue_us = one_way_us - cl_minimum_update(&rtt->one_way, one_way_us, received_us);

    rtt->queue_us = (uint32_t)(one_way_queue_us < network_queue_us ? one_way_queue_us : network_queue_us);
}

uint32_t cl_rtt_base_us(const struct cl_rtt *rtt)
{
    return rtt->network.any ? (uint32_t)least(&rtt->network) : CL_RTT_INITIAL_US;
}
