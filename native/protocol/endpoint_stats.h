/* Endpoint statistics: counters since the endpoint was created; all monotonic. */
#ifndef CL_PROTOCOL_ENDPOINT_STATS_H
#define CL_PROTOCOL_ENDPOINT_STATS_H

#include <stdint.h>

struct cl_endpoint_stats {
    uint64_t packets_sent, packets_received, payload_bytes_sent, payload_bytes_received;
    uint64_t packets_retransmitted, packets_lost, packets_spurious, packets_duplicate;
    /* dropped before they touch anything: not of our making (magic, version, job, epoch, source, path, place), with a
     * wrong tag, or seen before */
    uint64_t packets_foreign, packets_forged, packets_replayed;
    uint64_t packets_unexpected, packets_unexpected_dropped, acks_sent, acks_received, probes_sent;
    uint64_t packets_given_up; /* lost, within a bound, and not sent again */
    uint64_t packets_late;     /* came after their message was ended without them */
    uint64_t messages_stopped; /* receives ended without some of their packets */
};

#endif
