/*
 * Repeat: sends the last packets before a pause a second time, where a loss is likely and costs a long round trip.
 *
 * The sender learns of a loss one round trip after the packet has left. So where a path with long round trips loses
 * packets, the sender uses its pauses: when all messages to a peer are sent, and nothing has left by the path for an
 * eighth of a round trip, each packet in flight leaves once more. A burst of losses is mostly over by then. The
 * copies take room in the window, and delay data that is posted before they are acknowledged if it does not fit in
 * beside them. So all copies through an interface occupy it for at most half of a round trip; if they would take
 * longer, none leave. A copy gets no copy; a packet that is declared lost while its copy is on its way leaves a
 * third time. Messages with a loss bound get no copies, nor do those of classes from CL_CLASSES_PROMPT on. Flach et
 * al. (Reducing Web Latency, SIGCOMM 2013) send every packet twice, at once: Proactive.
 */
#pragma once

#include "protocol/endpoint_state.h"

enum { CL_REPEAT_MOST = 2 }; /* all copies may take half of a round trip */

/* The time of cl_path_repeat_us has come. Gives the packets back to their messages, to be sent again. */
void cl_repeat(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us);
