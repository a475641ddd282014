/*
 * Endpoint: one process's side of the DLCP protocol, without I/O: no socket, no clock, no thread, no global state.
 *
 * The engine (or the simulator) drives it:
 *   1. cl_endpoint_receive for each datagram that came in,
 *   2. cl_endpoint_send to fill datagrams that may leave now, until it returns 0; cl_endpoint_refuse gives those back
 *      that a full port does not take,
 *   3. cl_endpoint_next_completion until it returns false,
 *   4. sleep until a datagram comes or cl_endpoint_next_timeout is reached; then cl_endpoint_timeout.
 * All calls must come from one thread (or be serialised). Times are microseconds of any monotonic clock.
 *
 * A message is one transfer from one rank to another, named by (group, sequence, index); both sides post it with the
 * same length. Each packet carries its place in the message. Packets may come in any order and over any path; each byte
 * is delivered to the sink exactly once. Packets that come before their receive is posted are unexpected packets. They
 * are kept up to unexpected_limit_bytes and refused beyond; the sender is told when there is room again.
 *
 * Point-to-point messages of a group bear its id with CL_GROUP_P2P. Their sequence is the tag; their index counts the
 * messages of one tag from sender to receiver, and may wrap. Receives of one tag are posted in the order of the index,
 * so that a count per tag is enough to recognise finished messages. A message that comes before its receive is posted
 * is announced, for receives from any source. Point-to-point messages end with their group.
 *
 * A partial message (struct cl_qos, loss_bound > 0) may end without some of its packets: see partial.h. Both sides then
 * complete with the same list of missing ranges.
 */
#pragma once

#include <stdbool.h>

#include "commlayer.h"
#include "protocol/ending.h"
#include "protocol/endpoint_config.h"
#include "protocol/inbound.h"
#include "protocol/message_id.h"
#include "protocol/outbound.h"
#include "protocol/revival.h"
#include "protocol/sink.h"
#include "protocol/upkeep.h"

struct cl_endpoint;

struct cl_completion {
    void *context; /* as given to cl_endpoint_post_* */
    int status;    /* CL_OK, CL_EPEERLOST, CL_EABORTED, CL_EMISMATCH, CL_ENOMEM */
    uint16_t peer;
    uint64_t first_us; /* when its first packet was sent or received; 0: none was */
    /* The bytes of a partial message that were not counted, with CL_OK; the same list on both sides; valid until the
     * next call of cl_endpoint_next_completion. */
    uint32_t missing_count;
    const struct cl_range *missing;
};

int cl_endpoint_create(const struct cl_endpoint_config *config, struct cl_endpoint **endpoint);
void cl_endpoint_destroy(struct cl_endpoint *endpoint);

/* Adds a peer with 1 to 8 paths. Path i leaves through interface interfaces[i], 0 to 7, which all peers' paths through
 * it share fairly; NULL: through interface i. Adding a peer twice is CL_EINVAL. */
int cl_endpoint_add_peer(struct cl_endpoint *endpoint, uint16_t peer, uint16_t path_count, const uint32_t *interfaces);

/* Asks the peer for an answer on each path, with a PING. CL_EINVAL for an unknown or a lost peer. */
int cl_endpoint_ping(struct cl_endpoint *endpoint, uint16_t peer);

/* Pauses a path, or ends the pause: data takes it only while no other path to the peer lives. CL_EINVAL for an unknown
 * peer or path. */
int cl_endpoint_pause(struct cl_endpoint *endpoint, uint16_t peer, uint32_t path, bool paused);

/* The peer grants credit (credit_bytes of its configuration): what this process sends to it waits for that, but for so
 * many bytes of each message. CL_EINVAL for an unknown peer. */
int cl_endpoint_credit_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t unscheduled_bytes);

/* What this process knows of interface 0 to 7, for the others of this host. */
struct cl_told cl_endpoint_tell(const struct cl_endpoint *endpoint, uint32_t interface);
/* What another process of this host, a number from 0 to CL_NEIGHBOURS_MAX - 1, knows of it. Before each
 * cl_endpoint_send all of them are heard, then cl_endpoint_heard is called: the processes share the interface so.
 * Returns whether another one sends now. */
void cl_endpoint_hear(struct cl_endpoint *endpoint, uint32_t interface, uint32_t neighbour, const struct cl_told *told,
                      uint64_t now_us);
bool cl_endpoint_heard(struct cl_endpoint *endpoint, uint64_t now_us);

/* Gives this process and the peer a key of their own, to be used instead of the job's; before their first packet.
 * CL_EINVAL for an unknown peer. */
int cl_endpoint_key_peer(struct cl_endpoint *endpoint, uint16_t peer, const uint8_t key[16]);

/* Path i leaves through the caller's port ports[i], 0 to 63; without this call, through the port with the number of its
 * interface. CL_EINVAL for an unknown peer or port. */
int cl_endpoint_bind_peer(struct cl_endpoint *endpoint, uint16_t peer, const uint32_t *ports);

/* Whether packets may have so many bytes of payload: a multiple of 8 that datagram_bytes hold. */
bool cl_endpoint_can_cut(const struct cl_endpoint *endpoint, uint32_t payload_bytes);
/* Cuts messages to and from the peer into packets of payload_bytes, the same at both ends; before their first message.
 * CL_EINVAL for an unknown peer, and for a size that cl_endpoint_can_cut denies. */
int cl_endpoint_cut_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t payload_bytes);

/* Begins an operation, which lasts until cl_endpoint_end. Its messages carry the signature (0 to 4095); messages of
 * peers with another signature fail the group with CL_EMISMATCH. 0: not compared. CL_ENOMEM. */
int cl_endpoint_begin(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence, uint16_t signature);
void cl_endpoint_end(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);
/* Notes an operation that will begin after later ones, until an additional cl_endpoint_end: while it waits, its
 * messages do not count as finished, however many operations finish meanwhile. */
void cl_endpoint_delay(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

/* Both return CL_EINVAL for an unknown peer, a bad priority, the sequence UINT32_MAX, a name that was posted before or
 * a point-to-point receive out of turn; CL_EPEERLOST, CL_EABORTED or CL_ECLOSED when the peer or the group is gone.
 * Then there is no completion. A message that a lost peer had sent completely can still be received. length may be 0:
 * the message then consists of one empty packet. A send completes when the peer has acknowledged every byte, a receive
 * when every byte has been delivered. qos->priority: 0 (first) to 7 (last), or CL_CLASS_YIELDS; the receiver ignores
 * it. For a partial message, both sides must pass the same loss_bound (else CL_EMISMATCH ends the message), and both or
 * neither must protect packets; only the sender reads the `protect` map. Also CL_EINVAL for a loss_bound above
 * CL_LOSS_BOUND_MAX, and for a map with protect_bytes 0. */
int cl_endpoint_post_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, const void *data,
                          uint32_t length, const struct cl_qos *qos, uint64_t now_us, void *context);
int cl_endpoint_post_receive(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, struct cl_sink sink,
                             uint32_t length, const struct cl_qos *qos, uint64_t now_us, void *context);

/* Whether a send of this name has not ended. */
bool cl_endpoint_is_sending(const struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id);
/* Such a send reads its data there from now on. They must be the same as where it read them before. */
void cl_endpoint_move_send(struct cl_endpoint *endpoint, uint16_t peer, struct cl_message_id id, const void *data);

/* The round trip to the peer by its shortest path, when the queues are empty; 0: not measured. */
uint64_t cl_endpoint_round_us(const struct cl_endpoint *endpoint, uint16_t peer);

/* The index with which the next receive of this tag must be posted. `group` has CL_GROUP_P2P here and below. */
uint32_t cl_endpoint_next_index(const struct cl_endpoint *endpoint, uint16_t peer, uint32_t group, uint32_t tag);
/* Finds the announced message of this tag that came first, among those that are next in turn from their peer. False:
 * there is none. */
bool cl_endpoint_find_announced(const struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint16_t *peer);
/* While a tag is wanted, the next message from each peer is announced even when there is no room for its packets. False
 * when there is no memory. */
bool cl_endpoint_want(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag, uint64_t now_us);
void cl_endpoint_unwant(struct cl_endpoint *endpoint, uint32_t group, uint32_t tag);

/* The late peer of an operation in flight: the one whose missing message has the lowest index; UINT16_MAX: none. Walks
 * through all messages. */
uint16_t cl_endpoint_late_peer(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

bool cl_endpoint_next_completion(struct cl_endpoint *endpoint, struct cl_completion *completion);

/* Whether the peer is lost, unknown, or has been silent for so long that it would be lost if a message were expected.
 */
bool cl_endpoint_peer_silent(const struct cl_endpoint *endpoint, uint16_t peer, uint64_t now_us);
/* The longest time after which a live peer repeats a packet whose acknowledgement it misses, as far as known. */
uint32_t cl_endpoint_slowest_us(const struct cl_endpoint *endpoint);
const struct cl_engine_stats *cl_endpoint_stats(const struct cl_endpoint *endpoint);
/* Fills in up to `capacity` paths to a peer, all fields but the port. Returns the number of paths, or CL_EINVAL for an
 * unknown peer. */
int cl_endpoint_read_paths(const struct cl_endpoint *endpoint, uint16_t peer, struct cl_path_stats *paths,
                           uint32_t capacity);
