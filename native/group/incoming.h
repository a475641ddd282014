/*
 * Incoming: the messages of a channel whose head came before their receive, or whose data is still to come.
 */
#pragma once

#include "group/channel_state.h"

/* Takes the first receive with this tag that has no message; NULL: there is none. */
struct cl_transfer *cl_incoming_receive(struct cl_channel *channel, uint32_t tag);
/* Keeps a message. NULL: no memory. */
struct cl_incoming *cl_incoming_keep(struct cl_channel *channel, const struct cl_ring_entry *entry);
/* Gives a message its receive. CL_EMISMATCH: their lengths differ, and the receive has ended. */
int cl_incoming_match(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming,
                      struct cl_transfer *receive);
/* All data of a message is here. */
void cl_incoming_arrive(struct cl_channels *channels, struct cl_channel *channel, struct cl_incoming *incoming);
/* Writes the answers of offers for which the ring had no room, as far as it has room now. */
void cl_incoming_answer(struct cl_channels *channels, struct cl_channel *channel);
/* Reads offers of all senders, `budget` bytes of the most urgent ones, and writes their answers. Returns whether there
 * is more to do at once; *deadline_us is lowered to the time when there is. */
bool cl_incoming_fetch(struct cl_channels *channels, uint64_t now_us, uint64_t *deadline_us, uint64_t budget);
