/*
 * Endpoint: one process's side of the DLCP protocol, without I/O: no socket, no clock, no thread, no global state.
 *
 * The engine (or the simulator) drives it:
 *   1. cl_endpoint_receive for each datagram that came in,
 *   2. cl_endpoint_send to fill datagrams that may leave now, until it returns 0,
 *   3. cl_endpoint_next_completion until it returns false,
 *   4. sleep until a datagram comes or cl_endpoint_next_timeout is reached; then cl_endpoint_timeout.
 * All calls must come from one thread (or be serialised). Times are microseconds of any monotonic clock.
 *
 * A message is one transfer from one rank to another, named by (group, sequence, index); both sides post it with the
 * same length. Its packets carry their own place, may come in any order and over any path, and are delivered to the
 * sink exactly once per byte. A message may arrive before its receive is posted: its packets are kept up to
 * unexpected_limit_bytes, above which they are dropped unacknowledged, and the sender is told when there is room again.
 *
 * Point-to-point messages of a group bear its id with CL_GROUP_P2P. Their sequence is the tag; their index counts the
 * messages of one tag from sender to receiver, and may wrap. Their receives are posted in the order of the index, which
 * is all the memory that this needs of the past. One that comes before its receive is posted is announced, so that
 * somebody can receive from any source. They share the fate of the group: what ends it ends them.
 *
 * A message posted with a bound (struct cl_qos, loss_bound > 0) may end without some of its packets: see bounded.h.
 * Both sides then complete with the same list of missing ranges.
 */
#ifndef CL_PROTOCOL_ENDPOINT_H
#define CL_PROTOCOL_ENDPOINT_H

#include <stdbool.h>

#include "commlayer.h"
#include "protocol/ending.h"
#include "protocol/endpoint_config.h"
#include "protocol/inbound.h"
#include "protocol/message_id.h"
#include "protocol/outbound.h"
#include "protocol/sink.h"
#include "protocol/upkeep.h"

struct cl_endpoint;

struct cl_completion {
    void *context; /* as given to cl_endpoint_post_* */
    int status;    /* CL_OK, CL_EPEERLOST, CL_EABORTED, CL_EMISMATCH, CL_ENOMEM */
    uint16_t peer;
    /* With CL_OK, of a bounded message: the bytes that were not counted, the same list on both sides; valid until the
     * next call of cl_endpoint_next_completion. */
    uint32_t missing_count;
    const struct cl_range *missing;
};

int cl_endpoint_create(const struct cl_endpoint_config *config, struct cl_endpoint **endpoint);
void cl_endpoint_destroy(struct cl_endpoint *endpoint);

/* path_count 1..8; the n-th paths to all peers leave through the same interface, which they share fairly. Adding a peer
 * twice is CL_EINVAL. */
int cl_endpoint_add_peer(struct cl_endpoint *endpoint, uint16_t peer, uint16_t path_count);
/* The same, where the paths leave through the interfaces with these numbers, 0..7. */
int cl_endpoint_add_peer_through(struct cl_endpoint *endpoint, uint16_t peer, uint16_t path_count,
                                 const uint32_t *interfaces);

/* From here on packets to and from the peer are made under this key of theirs alone, and not under the job's: before
 * the first one. CL_EINVAL for an unknown peer. */
int cl_endpoint_key_peer(struct cl_endpoint *endpoint, uint16_t peer, const uint8_t key[16]);

/* From here on messages to and from the peer are cut into packets of payload_bytes, the same at both ends: before the
 * first one. CL_EINVAL for an unknown peer, for more than datagram_bytes hold, and for no multiple of 8. */
int cl_endpoint_cut_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t payload_bytes);

/* An operation begins: its messages carry the signature (0 to 4095), and messages of peers that carry another one fail
 * the group with CL_EMISMATCH. 0: they are not compared. Ends with cl_endpoint_end. CL_ENOMEM. */
int cl_endpoint_begin(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence, uint16_t signature);
void cl_endpoint_end(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

/* Both return CL_EINVAL for an unknown peer, a bad priority, the sequence UINT32_MAX, a name that was posted before or
 * a point-to-point receive out of turn,
 * CL_EPEERLOST, CL_EABORTED or CL_ECLOSED when peer or group are gone already; then there is no completion. What a lost
 * peer had sent completely before can still be received.
 * length may be 0: the message then consists of one empty packet. priority 0 (first) to 7 (last). A send completes when
 * the peer has acknowledged every byte. A receive completes when every byte has been delivered. */
int cl_endpoint_post_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, const void *data,
                          uint32_t length, uint8_t priority, uint64_t now_us, void *context);
int cl_endpoint_post_receive(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, struct cl_sink sink,
                             uint32_t length, uint64_t now_us, void *context);
/* The same with a bound; both sides must name the same loss_bound (else CL_EMISMATCH ends the message), and both
 * whether there is a `protect` map or a protected end, which only the sender reads. Also CL_EINVAL for a loss_bound
 * above CL_LOSS_BOUND_MAX, and for a map with protect_bytes 0. */
int cl_endpoint_post_partial_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id,
                                  const void *data, uint32_t length, const struct cl_qos *qos, uint64_t now_us,
                                  void *context);
int cl_endpoint_post_partial_receive(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id,
                                     struct cl_sink sink, uint32_t length, const struct cl_qos *qos, uint64_t now_us,
                                     void *context);

/* The index with which the next receive of this tag is to be posted. `group` has CL_GROUP_P2P in these three. */
uint32_t cl_endpoint_next_index(const struct cl_endpoint *endpoint, uint16_t peer, uint32_t group, uint32_t tag);
/* The peer whose announced message of this tag came first and is the next one from that peer; false: there is none. */
bool cl_endpoint_find_announced(const struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint16_t *peer);
/* While a tag is wanted, the next message from each peer is announced even when its packets find no room. False when
 * there is no memory. */
bool cl_endpoint_want(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint64_t now_us);
void cl_endpoint_unwant(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag);

/* Of an operation in flight, the peer whose message is missing first; UINT16_MAX: none. Walks through all messages. */
uint16_t cl_endpoint_late_peer(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

bool cl_endpoint_next_completion(struct cl_endpoint *endpoint, struct cl_completion *completion);

/* Lost, or so silent that it would be if anything were expected from it; also true for an unknown peer. */
bool cl_endpoint_peer_silent(const struct cl_endpoint *endpoint, uint16_t peer, uint64_t now_us);
/* The longest time after which a live peer that misses an acknowledgement asks again, as far as known. */
uint32_t cl_endpoint_slowest_us(const struct cl_endpoint *endpoint);
bool cl_endpoint_peer_alive(const struct cl_endpoint *endpoint, uint16_t peer);
const struct cl_engine_stats *cl_endpoint_stats(const struct cl_endpoint *endpoint);
/* Fills in all but the port of each path to a peer; returns how many there are, or CL_EINVAL for an unknown one. */
int cl_endpoint_read_paths(const struct cl_endpoint *endpoint, uint16_t peer, struct cl_path_stats *paths,
                           uint32_t capacity);

#endif
