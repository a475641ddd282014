/*
 * DCTCP: a TCP with the congestion control of Alizadeh et al., "Data Center TCP", SIGCOMM 2010 (RFC 8257): a reliable,
 * ordered stream, to compare with. As in Linux where it matters: initial window of 10 segments, slow start, alpha
 * starts at 1, g = 1/16, the window shrinks by alpha / 2 at most once per round trip; every segment is acknowledged,
 * with the latest block of a selective acknowledgement; loss is detected as by RACK with a reordering of three
 * segments, so that lost retransmissions are noticed, too; the window is halved once per window with losses; other
 * losses wait for the RTO (RFC 6298, with a configurable minimum), which doubles each time. Segments are
 * numbered, and windows are counted in them. Connections are open from the start and keep their window while idle.
 */
#pragma once

#include "fabric/fabric.h"

/* A message on a connection; the end that names it first makes it. */
struct sim_dctcp_message {
    uint32_t job, index;
    uint64_t end;                         /* the first segment after it; 0: not sent yet */
    bool arrived, received;               /* all segments have come; the receive has completed */
    void *send_context, *receive_context; /* NULL: not posted, or completed */
    struct sim_dctcp_message *next;
};

enum sim_segment_state { SIM_SEGMENT_FLYING, SIM_SEGMENT_LOST, SIM_SEGMENT_SACKED };

struct sim_dctcp_segment {
    uint64_t order;   /* of its latest transmission, counted over the connection */
    uint64_t sent_ns; /* of the latest transmission */
    uint32_t length;
    uint8_t state; /* enum sim_segment_state, from `una` to `next` */
    bool arrived;  /* at the receiver, out of order */
};

struct sim_dctcp;

struct sim_dctcp_connection {
    struct sim_event rto;
    struct sim_dctcp *dctcp;
    uint16_t from, to;
    uint32_t salt; /* stands for a port in the entropy of its packets */
    /* a ring: segments [una, next) are in flight, [next, end) wait */
    struct sim_dctcp_segment *segments;
    uint64_t una, next, end, capacity;
    uint64_t expected; /* at the receiver: the first missing segment */
    uint64_t orders, newest_order;
    uint32_t flying, lost;
    double window, threshold; /* cwnd and ssthresh, segments */
    double alpha;
    uint64_t round_end;             /* alpha is updated when this segment is acknowledged */
    uint64_t cut_until, hold_until; /* no second cut, and no growth, before this segment is acknowledged */
    uint64_t round_acked, round_marked;
    uint64_t srtt_ns, variation_ns, rto_at_ns;
    uint32_t timeouts; /* in a row */
    struct sim_dctcp_message *messages;
    bool flow;                         /* background: without messages; ends when all segments are acknowledged */
    void *context;                     /* for flow_done */
    struct sim_dctcp_connection *made; /* the one opened before it */
};

struct sim_dctcp_counts {
    uint64_t segments, again, timeouts, cuts;
};

struct sim_dctcp {
    struct sim_transport transport;
    struct sim_fabric *fabric;
    uint8_t protocol;
    uint32_t segment_bytes; /* payload of a full segment */
    uint64_t rto_min_ns;
    struct sim_dctcp_connection **connections; /* of the job, by from * hosts + to; opened when first used */
    struct sim_dctcp_connection *made;
    struct sim_dctcp_counts counts;
    void (*flow_done)(void *context); /* may be NULL */
};

/* Registers the transport with the fabric. mtu: of the IP packet. */
void sim_dctcp_init(struct sim_dctcp *dctcp, struct sim_fabric *fabric, uint8_t protocol, uint32_t mtu,
                    uint64_t rto_min_ns);
void sim_dctcp_free(struct sim_dctcp *dctcp);

/* Opens a connection for one flow of the background, `length` bytes long. */
void sim_dctcp_flow(struct sim_dctcp *dctcp, uint16_t from, uint16_t to, uint32_t salt, uint64_t length, void *context);
