/*
 * Credit: a receiver grants its senders the packets that they may send, so that no more than a budget (budget.h) is on
 * its way to its interfaces, however many send to it (after SIRD: Prasopoulos et al., NSDI 2025). Windows still limit
 * each path.
 *
 * A sender with a message ready sends a REQUEST, which says how many packets leave without credit. The receiver answers
 * with GRANTs: the packets of one message before a number. They are cumulative, so a repeated or late one does no harm,
 * and like all control packets they are sent again when lost. A packet that is sent again needs no credit.
 *
 * The ledger counts the packets that are granted and have not come: `owed`, by message. It grants what is most urgent:
 * by class, then by the number of the message in its operation (contributions before results, early segments before
 * late ones), then in turns (ledger.h). A message owes no more than one grant while many wait. Credit of a message that
 * ends is free again, and so is credit of which nothing has come for WRITE_OFF_US and some round trips: its sender has
 * stalled, or its packets are lost for good.
 *
 * Messages of one packet and point-to-point messages need no credit: a REQUEST costs a packet, too, and a receive from
 * any source waits for the first packet.
 */
#pragma once

#include "protocol/message.h"

struct cl_endpoint;
struct cl_peer;
struct cl_packet;
struct cl_rtt;

/* ---- sender ---- */

/* A send was posted: asks for credit if its receiver grants any. */
void cl_credit_request(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_send *send, uint64_t now_us);
/* The send ends. */
void cl_credit_sent(struct cl_endpoint *endpoint, const struct cl_send *send);
/* The send that has more credit now, and is to be queued; NULL: there is none. */
struct cl_send *cl_credit_on_grant(struct cl_endpoint *endpoint, struct cl_peer *peer, const struct cl_packet *packet);

/* ---- receiver ---- */

/* An acknowledgement has measured a path: that may change a derived budget. */
void cl_credit_measured(struct cl_endpoint *endpoint, const struct cl_rtt *rtt);

/* A REQUEST for this receive came, which may not be posted yet; unscheduled: packets that leave without credit. */
void cl_credit_on_request(struct cl_endpoint *endpoint, struct cl_receive *receive, uint32_t unscheduled,
                          uint64_t now_us);
/* The receive was posted. */
void cl_credit_posted(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us);
/* A packet of it came, for the first time. */
void cl_credit_arrived(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us);
/* It ends. */
void cl_credit_leave(struct cl_endpoint *endpoint, struct cl_receive *receive);
/* The timer fired: writes off what stalled senders owe. */
void cl_credit_expire(struct cl_endpoint *endpoint, uint64_t now_us);
