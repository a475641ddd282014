/* Placement: delivers the payload of posted receives to their sinks, each byte once. */
#pragma once

#include "protocol/endpoint_state.h"
#include "protocol/packet.h"

enum cl_placed { CL_PLACED, CL_PLACED_BEFORE, CL_PLACED_NOWHERE /* the message has another length */ };

/* Places a DATA packet; `offset` is that of its header. Completes the message when the packet is the last one that was
 * missing, or does not fit. */
enum cl_placed cl_placement_put(struct cl_endpoint *endpoint, struct cl_receive *receive, uint8_t flags,
                                uint32_t offset, const uint8_t *payload, uint16_t length, uint64_t now_us);
/* Places the unexpected packets of a message that was just posted. False when that ended the message. */
bool cl_placement_replay(struct cl_endpoint *endpoint, struct cl_receive *receive, uint64_t now_us);
