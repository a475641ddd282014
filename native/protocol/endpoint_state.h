/* Endpoint state: the nouns of which an endpoint consists. Private to the parts of the endpoint. */
#pragma once

#include "protocol/announcements.h"
#include "protocol/budget.h"
#include "protocol/closed_groups.h"
#include "protocol/endpoint_config.h"
#include "protocol/ledger.h"
#include "protocol/nics.h"
#include "protocol/outbox.h"
#include "protocol/peer_list.h"
#include "protocol/queue.h"
#include "protocol/signatures.h"
#include "protocol/table.h"
#include "protocol/timers.h"
#include "protocol/unexpected.h"

struct cl_endpoint {
    struct cl_endpoint_config config;
    struct cl_seal seal;
    struct cl_nh_key nh; /* the key of all seals */
    struct cl_engine_stats stats;
    uint32_t payload_bytes; /* payload of the largest DATA packet; peers may take less */
    struct cl_peer_list peers;
    struct cl_nics nics;
    struct cl_timers timers;
    uint64_t awake_us; /* when the endpoint was last driven */
    uint64_t asked_us; /* when it was last asked for packets to send */
    uint64_t pause_us; /* between the last two such times; 0: too little left at the first of them */
    size_t handed_out; /* packets of messages that left at asked_us */
    struct cl_table table;
    struct cl_queue queue;
    struct cl_ledger ledger;
    struct cl_budget budget;
    struct cl_outbox outbox;
    struct cl_unexpected unexpected;
    struct cl_index unposted; /* receives of collectives that are not posted, by operation */
    struct cl_announcements announcements;
    struct cl_closed_groups closed;
    struct cl_signatures signatures;
    struct cl_message_list completed;
    uint64_t lacking;         /* see cl_endpoint_lacking */
    struct cl_ranges missing; /* missing ranges of the completion handed out last */
};

/* The seal of packets to and from the peer. */
static inline const struct cl_seal *cl_endpoint_seal(const struct cl_endpoint *endpoint, const struct cl_peer *peer)
{
    return peer->keyed ? &peer->seal : &endpoint->seal;
}

/* The epoch of packets to and from the peer: that of the job, changed by each incarnation. */
static inline uint16_t cl_endpoint_epoch(const struct cl_endpoint *endpoint, const struct cl_peer *peer)
{
    return (uint16_t)(endpoint->config.epoch + peer->incarnation);
}

static inline void cl_endpoint_arm(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t deadline_us)
{
    cl_timers_arm(&endpoint->timers, &peer->timer, deadline_us);
}
