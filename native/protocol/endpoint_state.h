/*
 * The inside of struct cl_endpoint, shared by its parts: endpoint.c (posting), ending.c (failure), inbound.c (datagrams
 * that come), outbound.c (datagrams that go), upkeep.c (timers) and bounded.c (messages that may lose packets).
 */
#ifndef CL_PROTOCOL_ENDPOINT_STATE_H
#define CL_PROTOCOL_ENDPOINT_STATE_H

#include "protocol/closed_groups.h"
#include "protocol/endpoint.h"
#include "protocol/peer.h"
#include "protocol/signatures.h"
#include "protocol/table.h"
#include "protocol/unexpected.h"

struct cl_endpoint_abort {
    uint32_t group;
    uint16_t culprit; /* UINT16_MAX: nobody */
    int reason;
};

struct cl_endpoint_wanted {
    uint32_t group, tag;
};

struct cl_endpoint {
    struct cl_endpoint_config config;
    struct cl_seal seal;
    struct cl_endpoint_stats stats;
    const struct cl_cc_type *congestion;
    uint32_t payload_bytes; /* of the largest DATA packet; peers may take less */

    struct cl_peer **peers; /* by id; NULL where there is none */
    uint32_t peers_length;
    uint32_t peer_count;
    struct cl_egress egresses[CL_PEER_PATHS_MAX];
    struct cl_ingress ingresses[CL_PEER_PATHS_MAX];
    uint16_t egress_count;
    struct cl_timer egress_timer;               /* when the first pacer that is in the way lets go */
    struct cl_peer *urgent_first, *urgent_last; /* peers with something to send before any data */

    struct cl_table table;
    struct cl_queue queue;
    struct cl_unexpected unexpected;
    struct cl_timers timers;
    uint64_t awake_us; /* when somebody last drove this endpoint */
    struct cl_closed_groups closed;
    struct cl_signatures signatures;
    struct cl_message *completed_first, *completed_last; /* linked by `next` */
    struct cl_ranges missing;                            /* of the completion handed out last */
    struct cl_message *announced_first, *announced_last; /* in order of arrival */
    struct cl_endpoint_wanted *wanted;
    uint32_t wanted_count, wanted_capacity;
    struct cl_endpoint_abort *aborts;
    uint32_t abort_count, abort_capacity;
};

/* NULL when there is no such peer. */
static inline struct cl_peer *cl_endpoint_peer(const struct cl_endpoint *endpoint, uint16_t id)
{
    return id < endpoint->peers_length ? endpoint->peers[id] : NULL;
}

/* What packets to and from the peer are sealed with. */
static inline const struct cl_seal *cl_endpoint_seal(const struct cl_endpoint *endpoint, const struct cl_peer *peer)
{
    return peer->keyed ? &peer->seal : &endpoint->seal;
}

/* The peer has an acknowledgement, a control packet, a probe or a ping to send. */
void cl_endpoint_urge(struct cl_endpoint *endpoint, struct cl_peer *peer);
static inline void cl_endpoint_arm(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t deadline_us)
{
    cl_timers_arm(&endpoint->timers, &peer->timer, deadline_us);
}
void cl_endpoint_tell(struct cl_endpoint *endpoint, struct cl_peer *peer, uint8_t kind, struct cl_control control);

/* Ends a posted message: out of all lists, into the completions. */
void cl_endpoint_complete(struct cl_endpoint *endpoint, struct cl_message *message, int status);
/* Forgets a message without completion. */
void cl_endpoint_discard(struct cl_endpoint *endpoint, struct cl_message *message);
/* Puts a message with something to send into the queue, unless it waits for room at the receiver. */
void cl_endpoint_requeue(struct cl_endpoint *endpoint, struct cl_message *message, bool first);

/* `peer` and we disagree on what (group, sequence) is: fails the group, for cl_endpoint_next_abort to tell. */
void cl_endpoint_disagree(struct cl_endpoint *endpoint, struct cl_peer *peer, uint32_t group);

/* The group failed: remembers it and completes its messages with CL_EABORTED. False when it was closed before. */
bool cl_endpoint_fail_group(struct cl_endpoint *endpoint, uint32_t group, int reason, uint16_t culprit);

/* A point-to-point message has come whose receive is not posted yet. */
void cl_endpoint_announce(struct cl_endpoint *endpoint, struct cl_message *message);
/* Somebody waits for a message of this name from any source. */
bool cl_endpoint_wants(const struct cl_endpoint *endpoint, const struct cl_message_id *id);

/* What became of a packet of a posted receive. */
enum cl_placed { CL_PLACED, CL_PLACED_BEFORE, CL_PLACED_NOWHERE /* other length than posted */ };
/* Delivers the packet; completes the message when it is the last one, or does not fit. */
enum cl_placed cl_endpoint_place(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t offset, bool last,
                                 const uint8_t *payload, uint16_t length);

/* What happens to packets of ours, as callbacks for a path of `peer`. */
struct cl_outcome {
    struct cl_endpoint *endpoint;
    struct cl_peer *peer;
    uint64_t now_us;
};
struct cl_path_callbacks cl_outcome_callbacks(struct cl_outcome *outcome);

#endif
