/*
 * Outgoing: the sends of a channel, from the head to the last piece.
 */
#pragma once

#include "group/channel_state.h"

/* Writes the heads of sends in their order, as far as there is room, with all of the eager messages. */
void cl_outgoing_announce(struct cl_channels *channels, struct cl_channel *channel);
/* Writes DATA, the most urgent first, up to `budget` bytes. Half of the ring stays free for heads. Returns whether
 * there is more to write at once. */
bool cl_outgoing_stream(struct cl_channels *channels, struct cl_channel *channel, uint64_t budget);
/* Takes an offered send; NULL: there is none of that number. */
struct cl_transfer *cl_outgoing_take(struct cl_channel *channel, uint64_t number);
