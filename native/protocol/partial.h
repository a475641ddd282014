/*
 * Partial messages: messages that may lose packets, up to a loss bound on which both ends agree. Part of the endpoint.
 *
 * The idea is DLCP's and MLT's (Wang et al., arXiv 2008.08445 and NSDI 2024): the receiver ends a message once the
 * missing packets are within its loss budget. Two questions remain: when it may do so without cutting off packets that
 * are still on their way, and what the sender learns of it.
 *
 *  - The sender sends every packet once. It gives lost packets up while the loss budget lasts; further lost packets,
 *    and protected ones, it sends again. A packet sent when nothing else is left to send is marked TAIL.
 *  - The receiver ends the message when it knows that every packet was sent once (a TAIL or a PROBE came), all
 *    protected packets have arrived, the missing packets are within the budget, and nothing has come for as long as the
 *    network may reorder. Past the message's deadline it ends the message when all protected packets have arrived, the
 *    missing packets are within the budget, and packets stall.
 *  - It then reports the packets that it did not count (STOP, repeated until acknowledged). Both ends complete with
 *    that list. Packets that come later are refused, so that the sender never takes one of them for counted.
 *  - If packets were given up and all others have been sent, the TAIL may be lost, too. So the sender says that it has
 *    run out (PROBE, repeated until acknowledged, and again if it overtook the whole message). From then on the
 *    receiver also reports when it got every packet after all: acknowledgements of packets given up long ago may be
 * lost.
 *
 * When every packet arrives, there is no STOP, and a PROBE only while protected packets are not acknowledged.
 *
 * A PROBE carries {u32 number of protected packets, u32 loss budget}. The receiver waits for that many protected
 * packets; another budget than its own is a mismatch. TAIL is set only when the protected packets are acknowledged.
 */
#pragma once

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"

enum { CL_PROBE_BYTES = 8 };

/* The number of packets that may be missing: packet_count * loss_bound, rounded down. For bounds of n / 1,000,000 this
 * is exact: the rounding error of the product is below 1e-9. */
static inline uint32_t cl_partial_loss_budget(uint32_t packet_count, double loss_bound)
{
    return (uint32_t)(packet_count * loss_bound + 1e-9);
}

/* Prepare a message that was just begun; at the receiver, before unexpected packets are delivered. wary: packets of the
 * message were refused, so wait longer for them. */
void cl_partial_begin_send(struct cl_send *send, const struct cl_qos *qos);
void cl_partial_begin_receive(struct cl_endpoint *endpoint, struct cl_receive *receive, const struct cl_qos *qos,
                              bool wary, uint64_t now_us);

/* ---- at the sender; all of these do nothing for reliable messages ---- */

/* CL_PACKET_DROPPABLE, CL_PACKET_SAFE and CL_PACKET_TAIL for a packet that is about to be sent. */
uint8_t cl_partial_flags(const struct cl_send *send, uint32_t packet);
/* Gives a lost packet up if possible. False: it must be sent again. */
bool cl_partial_give_up(struct cl_endpoint *endpoint, struct cl_send *send, uint32_t packet);
/* Notes that the packet is acknowledged, for the first time. */
void cl_partial_done(struct cl_send *send, uint32_t packet);
/* Sends a PROBE if the message has run out: nothing is left to send, and packets were given up or protected ones are
 * not acknowledged yet. */
void cl_partial_run_out(struct cl_endpoint *endpoint, struct cl_send *send);
/* The receiver refused the PROBE, as it overtook all packets of its message. */
void cl_partial_on_probe_refused(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_control *probe);
/* Takes a STOP in. False: malformed. */
bool cl_partial_on_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                        const uint8_t *payload);

/* ---- at the receiver ---- */

/* Notes a packet of a posted message, which came for the first time (placed) or again and did not complete it. */
void cl_partial_on_packet(struct cl_endpoint *endpoint, struct cl_receive *receive, uint8_t flags, bool placed,
                          uint64_t now_us);
/* Whether this packet came too late: the receiver has ended its message, and has not told the sender for certain. */
bool cl_partial_is_late(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                        uint32_t packet);
/* Takes a PROBE in. CL_PROBED_NOTHING: no packet of its message has come yet, so the PROBE must be refused. */
enum cl_probed { CL_PROBED, CL_PROBED_NOTHING, CL_PROBED_MALFORMED };
enum cl_probed cl_partial_on_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                                   const uint8_t *payload, uint64_t now_us);
/* Tells the sender that the message is complete, if the sender has run out. */
void cl_partial_complete(struct cl_endpoint *endpoint, const struct cl_receive *receive);
/* Ends the messages from this peer that may end now. */
void cl_partial_service(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us);

/* ---- both ---- */

/* Writes the payload of a control packet, of which only PROBE and STOP have one. Returns its length, or -1 when the
 * packet is not needed any more. */
int cl_partial_write(const struct cl_endpoint *endpoint, const struct cl_peer *peer, uint8_t kind,
                     const struct cl_control *control, uint8_t *payload);
