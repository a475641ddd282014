/*
 * Channels: point-to-point messages between the ranks of one host, through a ring (ring.h) in each direction of a pair.
 *
 * Small messages are eager: the ring carries head and data, and the send is done when they are written. The receiver
 * grants a number of bytes, which bounds the memory for messages that nobody receives yet. All other messages are
 * offered: the ring carries the head alone. The receiver then reads the sender's memory, where the kernel allows that
 * (CMA: process_vm_readv), and says TAKEN; or it asks for the data (STREAM), which follows in pieces (DATA). Pieces of
 * urgent messages go first. An offer that no receive takes within a moment is copied to this rank's memory while there
 * is room; so the sender is done as if a network had carried the message.
 *
 * Heads stay in the order in which their messages were sent. A receive takes the first message with its tag, and the
 * receives of one tag take messages in the order of their posting: see mailbox.h for receives from any source.
 *
 * All entries of a ring are read whenever this rank has something in flight, so neither side ever waits for the other
 * one to receive another message first.
 */
#pragma once

#include "group/channel_state.h"

struct cl_channels_options {
    uint32_t size, count, self;
    const uint32_t *local;   /* local index -> group rank; as `lost`, it must outlive the channels */
    const atomic_bool *lost; /* by local index */
    const struct cl_group_io *io;
};

/* Channels to nobody until cl_channels_map. CL_ENOMEM; cl_channels_free also after a failure. */
int cl_channels_init(struct cl_channels *channels, const struct cl_channels_options *options);
/* Forgets everything that is in flight: the transfers and their memory are about to go. */
void cl_channels_forget(struct cl_channels *channels);
void cl_channels_free(struct cl_channels *channels);
/* This rank's count of requests; the memory of the rings with local rank `index`, `bytes` of data each. All zeroed. */
void cl_channels_listen(struct cl_channels *channels, _Atomic uint32_t *requests);
void cl_channels_map(struct cl_channels *channels, uint32_t index, void *out, void *in, uint64_t bytes);

/* The channel with a group rank; NULL: it is on another host, or this rank. */
struct cl_channel *cl_channels_with(const struct cl_channels *channels, uint32_t rank);

/* Begin a transfer; its memory, length, tag and class are set. They return a status other than CL_OK if it fails the
 * group; the transfer's status tells its end. */
int cl_channel_send(struct cl_channels *channels, struct cl_channel *channel, struct cl_transfer *transfer);
int cl_channel_receive(struct cl_channels *channels, struct cl_channel *channel, struct cl_transfer *transfer);
/* The group rank of a message of this tag without a receive; false: there is none. */
bool cl_channels_find(struct cl_channels *channels, uint32_t tag, uint32_t *rank);

/* Moves messages. `waiting`: receives from any source wait. Returns a status other than CL_OK if the group must fail,
 * with the culprit's group rank. *more: there is more to do at once; *deadline_us is lowered to the next. */
int cl_channels_progress(struct cl_channels *channels, uint64_t now_us, bool waiting, bool *more, uint64_t *deadline_us,
                         uint32_t *culprit);
/* Whether this rank must hear of every entry that is written to it. */
static inline bool cl_channels_listens(const struct cl_channels *channels, bool waiting)
{
    return channels->requests != NULL && (channels->in_flight > 0 || channels->fetching > 0 || waiting);
}
/* Whether nothing is to be done until another rank makes a request, of which this one has asked to be told. */
bool cl_channels_may_sleep(struct cl_channels *channels);
/* Asks to be told of news. False when there are some. */
bool cl_channels_arm(struct cl_channels *channels, bool waiting);
