/*
 * RTT: the times of one path, from its acknowledgements.
 *
 * There are two estimates for two purposes. Timers (loss, PTO) need the whole time until the acknowledgement, hosts
 * included: smoothed_us and variation_us (RFC 6298 as in RFC 9002, 5.3). Congestion control needs the network's part:
 * queue_us is the time the packet stood in queues on its way to the peer. It is the smaller of
 *   - the one-way delay (receiver's clock minus sender's) above its minimum over the last 20-30 s: it does not see the
 *     acknowledgement's way back, and the clocks' offset cancels out; and
 *   - the round trip without host delay, above its minimum: it does not see the clocks' drift.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { CL_RTT_BUCKETS = 3, CL_RTT_BUCKET_US = 10000000 };

/* The minimum over the last CL_RTT_BUCKETS buckets of time. A pause, in which nothing is measured, counts as one
 * bucket: after it the queues may be long again before a packet finds them empty. */
struct cl_minimum {
    int64_t value[CL_RTT_BUCKETS];
    uint64_t bucket; /* the number of the bucket at value[bucket % CL_RTT_BUCKETS] */
    bool any;
};

struct cl_rtt {
    uint32_t smoothed_us;
    uint32_t variation_us;
    uint32_t latest_us;
    uint32_t queue_us; /* the queueing delay of the latest sample */
    uint32_t host_us;  /* how long acknowledgements lay in the peer, smoothed */
    bool any;
    struct cl_minimum network; /* round trip without host delay */
    struct cl_minimum one_way;
};

enum { CL_RTT_INITIAL_US = 1000 };

void cl_rtt_init(struct cl_rtt *rtt);

/* One sample: the packet left at sent_us (this host's clock) and reached the peer at peer_clock_us (the peer's clock,
 * low 32 bits). The acknowledgement lay host_delay_us in the peer, and arrived at received_us (this host's clock). */
void cl_rtt_update(struct cl_rtt *rtt, uint64_t sent_us, uint64_t received_us, uint32_t peer_clock_us,
                   uint32_t host_delay_us);

/* Round trip of the path when its queues are empty, without host delay. */
uint32_t cl_rtt_base_us(const struct cl_rtt *rtt);

/* Updates the minimum with `value` at `now_us` and returns it. */
int64_t cl_minimum_update(struct cl_minimum *minimum, int64_t value, uint64_t now_us);
