/*
 * Repeat: sends the last packets before a pause a second time, where a loss is likely and costs a long round trip.
 *
 * The sender learns of a loss one round trip after the packet has left. A copy that leaves in a pause of the sender
 * takes nobody's time. So where a path with long round trips loses packets, the packets in flight leave once more as
 * soon as nothing has left for a part of a round trip. A burst of losses is mostly over by then. All copies through an
 * interface take at most another part of a round trip; if they would take more, none leave, and the detection of losses
 * decides as usual. No packet gets two copies. A message that may lose packets gets none, nor does one that yields.
 * Flach et al. (Reducing Web Latency, SIGCOMM 2013) call this Proactive.
 */
#pragma once

#include "protocol/endpoint_state.h"

enum { CL_REPEAT_MOST = 2 }; /* all copies may take half of a round trip */

/* The time of cl_path_repeat_us has come. Gives the packets back to their messages, to be sent again. */
void cl_repeat(struct cl_endpoint *endpoint, struct cl_peer *peer, struct cl_path *path, uint64_t now_us);
