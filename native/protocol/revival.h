/*
 * Revival: a peer that was lost, but lives (its process or its network paused for longer than the peer timeout), is met
 * again when a new group is made. The two then begin anew, as if they had never met: with empty paths, packet numbers
 * from 0, and another epoch in their packets, so that packets of former incarnations are foreign. Only what users see
 * goes on: the counters of the paths, and which paths are paused.
 *
 * An incarnation is that number of a pair of processes: 0 at first. The two ends agree on it outside of the protocol
 * (commlayer/transport/incarnation.py).
 */
#pragma once

#include <stdint.h>

struct cl_endpoint;

/* Begins an incarnation of the peer. Messages in flight complete with CL_EPEERLOST first: the other end has given them
 * up. Messages that have come stay, and so does what is known of finished ones. An incarnation that has begun, or is
 * over, changes nothing. CL_EINVAL for an unknown peer. */
int cl_endpoint_revive_peer(struct cl_endpoint *endpoint, uint16_t peer, uint32_t incarnation);

/* CL_OK, CL_EPEERLOST when the peer is lost in this incarnation, or CL_EINVAL for an unknown one. */
int cl_endpoint_incarnation(const struct cl_endpoint *endpoint, uint16_t peer, uint32_t *incarnation);
