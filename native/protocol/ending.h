/* Ending: the part of the endpoint that ends operations, groups and peers whose messages are not complete. */
#pragma once

#include <stddef.h>

#include "protocol/closed_groups.h"

struct cl_endpoint;

/* Forgets every message of (group, sequence) without completions, and drops packets that come for it later. The
 * sequence UINT32_MAX closes the whole group, whose id cannot be used again. */
void cl_endpoint_cancel(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

/* Fails a group, here and on every peer in `peers`. Its posted messages complete with CL_EABORTED, and on the peers
 * cl_endpoint_next_abort reports the reason and the culprit (a peer; UINT16_MAX: not known). This process may be among
 * the peers. False when there was no memory to tell all of them: the caller tries again. */
bool cl_endpoint_abort(struct cl_endpoint *endpoint, uint32_t group, const uint16_t *peers, size_t count, int reason,
                       uint16_t culprit);
/* Fails a group because of a peer: its messages complete with CL_EABORTED, and cl_endpoint_next_abort reports it here.
 */
void cl_endpoint_fail_group(struct cl_endpoint *endpoint, uint32_t group, int reason, uint16_t culprit);
bool cl_endpoint_next_abort(struct cl_endpoint *endpoint, struct cl_closed_group *aborted);
/* How a group failed, also one that was not open here yet; NULL: it has not. */
const struct cl_closed_group *cl_endpoint_find_abort(const struct cl_endpoint *endpoint, uint32_t group);

/* Marks a peer dead: its messages complete with CL_EPEERLOST. The endpoint itself calls this for a peer with
 * outstanding messages: after 1.1 peer_timeout_us without any packet from it, or 2.2 without an acknowledgement
 * (cl_peer_lost_us). */
void cl_endpoint_peer_lost(struct cl_endpoint *endpoint, uint16_t peer);
