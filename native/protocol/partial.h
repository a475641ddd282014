/*
 * Bounded: messages that may lose packets, up to a bound their two ends agree on. Part of the endpoint.
 *
 * The idea is DLCP's and MLT's (Wang et al., arXiv 2008.08445 and NSDI 2024): the receiver ends a message when what is
 * missing is within its bound. What they leave open is when it may, without cutting off what is merely on its way, and
 * what the sender learns of it.
 *
 *  - The sender sends every packet once. Packets found lost are given up while they are within the bound; what exceeds
 *    it, and protected packets, are sent again. Packets sent when there is nothing else to send are marked TAIL.
 *  - The receiver ends the message when it knows that everything was sent once (a TAIL came, or a PROBE), no more is
 *    missing than the bound allows, and nothing has come for as long as the network may reorder. Or, past the
 *    message's deadline, when it is within the bound and its packets stall.
 *  - It then tells which packets it did not count (STOP, repeated until acknowledged). Both ends complete with that
 *    list. Packets that come after that are refused: a sender never takes one for counted.
 *  - When packets are given up and all else has been sent, the TAIL may be among the lost: the sender says that it has
 *    run out (PROBE, repeated likewise; again when it overtook the whole message). From then on the receiver also tells
 * when it got everything after all, as acknowledgements of packets long given up may be gone for good.
 *
 * When everything arrives there is neither PROBE nor STOP: the message is like a reliable one.
 *
 * A PROBE carries {u32 protected packets, u32 budget}: the receiver waits for as many protected packets, and
 * another budget is a mismatch. TAIL is only set once the protected packets are acknowledged.
 */
#ifndef CL_PROTOCOL_PARTIAL_H
#define CL_PROTOCOL_PARTIAL_H

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"

enum { CL_PROBE_BYTES = 8 };

/* Packets of `packet_count` that may be missing. A bound of n / 1,000,000 counts exactly: the rounding error of the
 * product is below 1e-9. */
static inline uint32_t cl_partial_loss_budget(uint32_t packet_count, double loss_bound)
{
    return (uint32_t)(packet_count * loss_bound + 1e-9);
}

/* Prepare a message that was just begun. The latter is called before unexpected packets are delivered. */
void cl_partial_begin_send(struct cl_endpoint *endpoint, struct cl_message *message, const struct cl_qos *qos);
void cl_partial_begin_receive(struct cl_endpoint *endpoint, struct cl_message *message, const struct cl_qos *qos,
                              bool wary, uint64_t now_us);

/* ---- at the sender; all of these do nothing for reliable messages ---- */

/* CL_PACKET_DROPPABLE and CL_PACKET_TAIL for a packet about to be sent. */
uint8_t cl_partial_flags(struct cl_endpoint *endpoint, const struct cl_message *message, uint32_t packet);
/* Whether the packet just found lost is not to be sent again. */
bool cl_partial_give_up(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet);
/* The packet is acknowledged, for the first time. */
void cl_partial_done(struct cl_endpoint *endpoint, struct cl_message *message, uint32_t packet);
/* Nothing is left to send, or a packet was given up: sees to it that the receiver learns so. */
void cl_partial_run_out(struct cl_endpoint *endpoint, struct cl_message *message);
/* The PROBE overtook all packets of its message. */
void cl_partial_on_probe_refused(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_control *probe);
/* False: malformed. */
bool cl_partial_on_stop(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                        const uint8_t *payload);

/* ---- at the receiver ---- */

/* A packet of a posted message came, for the first time (placed) or again; it did not complete the message. */
void cl_partial_on_packet(struct cl_endpoint *endpoint, struct cl_message *message, uint8_t flags, bool placed,
                          uint64_t now_us);
/* A packet came for a message that is over: whether it was ended without it. */
bool cl_partial_is_late(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_message_id *id,
                        uint32_t packet);
/* What a PROBE was about: CL_PROBED_NOTHING is a message of which nothing has come yet, so that it is refused. */
enum cl_probed { CL_PROBED, CL_PROBED_NOTHING, CL_PROBED_MALFORMED };
enum cl_probed cl_partial_on_probe(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet,
                                   const uint8_t *payload, uint64_t now_us);
/* The message is complete although its sender has run out: tells it. */
void cl_partial_complete(struct cl_endpoint *endpoint, const struct cl_message *message);
/* Ends what may end. */
void cl_partial_service(struct cl_endpoint *endpoint, struct cl_peer *peer, uint64_t now_us);

/* ---- both ---- */

/* Writes what follows the header of a PROBE or STOP; its length, or -1 when nobody needs the packet any more. */
int cl_partial_write(const struct cl_endpoint *endpoint, const struct cl_peer *peer, uint8_t kind,
                     const struct cl_control *control, uint8_t *payload);

#endif
