/* Ending: operations, groups and peers end before their messages are complete. Part of the endpoint. */
#ifndef CL_PROTOCOL_ENDING_H
#define CL_PROTOCOL_ENDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cl_endpoint;

/* Forgets every message of (group, sequence) without completions, and drops what comes for it later. The sequence
 * UINT32_MAX means the whole group: used when the group closes; its id cannot be used again. */
void cl_endpoint_cancel(struct cl_endpoint *endpoint, uint32_t group, uint32_t sequence);

/* Tells every peer in `peers` that the group failed; CL_EABORTED then completes their posted messages of that group,
 * and ours, and cl_endpoint_next_abort reports it there, with `culprit`: the peer that is the cause (UINT16_MAX: not
 * known). */
void cl_endpoint_abort(struct cl_endpoint *endpoint, uint32_t group, const uint16_t *peers, size_t count, int reason,
                       uint16_t culprit, uint64_t now_us);
/* A group failed because of a peer: its messages complete with CL_EABORTED, and cl_endpoint_next_abort reports it. */
void cl_endpoint_fail_group(struct cl_endpoint *endpoint, uint32_t group, int reason, uint16_t culprit);
bool cl_endpoint_next_abort(struct cl_endpoint *endpoint, uint32_t *group, uint16_t *culprit, int *reason);

/* Marks a peer dead: its messages complete with CL_EPEERLOST. Also called by the endpoint itself when a peer with
 * outstanding messages has not answered for peer_timeout_us, at most a tenth more after it was last heard. */
void cl_endpoint_peer_lost(struct cl_endpoint *endpoint, uint16_t peer);

#endif
