/*
 * Channel state: the inside of channels (channel.h), and the writing of entries, for the files that share it.
 */
#pragma once

#include <stddef.h>

#include "group/io.h"
#include "group/ring.h"

/* One end of a message: a send or a receive. */
struct cl_transfer {
    struct cl_transfer *next;
    uint8_t *memory;
    uint64_t length;
    uint64_t number;   /* the number of an offered send */
    uint64_t moved;    /* bytes of a send that are in the ring */
    uint64_t first_us; /* when its head was sent or received; 0: not yet */
    uint32_t tag;
    uint8_t class;
    int status; /* CL_EAGAIN: in flight */
};

struct cl_transfer_list {
    struct cl_transfer *first, **last;
};

/* A message whose head came before its receive, or whose data is still to come. */
struct cl_incoming {
    struct cl_incoming *next;
    struct cl_transfer *receive; /* NULL: none yet */
    uint8_t *bytes;              /* its data, or the memory for it, if the receive's is not used; or NULL */
    uint64_t length, moved;
    uint64_t number, address;
    uint64_t since_us;
    uint64_t cost; /* the room that an eager message took: to be granted again */
    uint32_t tag;
    uint8_t class;
    enum {
        CL_INCOMING_OFFERED,   /* the sender has it */
        CL_INCOMING_REFUSED,   /* its memory cannot be read: STREAM is to be written */
        CL_INCOMING_STREAMING, /* DATA comes */
        CL_INCOMING_READ,      /* all is read: TAKEN is to be written */
        CL_INCOMING_HERE,      /* its data is in `bytes` */
    } state;
};

/* The channel to one other rank of the host. */
struct cl_channel {
    struct cl_ring out, in;
    uint64_t eager_bytes;   /* the sum of all eager messages sent */
    uint64_t granted_bytes; /* what the other rank may send, in all */
    uint64_t used_bytes;    /* ... and used by it */
    uint64_t offers;
    struct cl_transfer_list sends, offered, streams; /* their head is not written; not taken; sending DATA */
    struct cl_transfer_list receives;                /* receives without a message */
    struct cl_incoming *incoming, **incoming_last;   /* in order of arrival */
    uint64_t wanted_bytes;                           /* the room for which this side waits; 0: it does not */
    bool gone;                                       /* the other rank had gone before the ring was read last */
    bool news, urgent_news;                          /* written since the other rank was told */
};

struct cl_channels {
    const struct cl_group_io *io;
    struct cl_channel *list; /* by local index */
    uint32_t *index;         /* group rank -> local index; UINT32_MAX: a rank of another host */
    const uint32_t *ranks;   /* local index -> group rank */
    uint32_t count, self;
    const atomic_bool *lost;    /* by local index: the process has died */
    _Atomic uint32_t *requests; /* raised by ranks that wait for this one */
    uint32_t seen_requests;
    uint64_t now_us;                       /* the time of this turn */
    uint32_t in_flight;                    /* transfers */
    uint32_t fetching;                     /* messages on their way to this rank's own memory */
    uint32_t undecided;                    /* offers without a receive */
    bool news;                             /* a channel has news */
    bool behind;                           /* a ring has entries that the latest turn left there */
    uint32_t next;                         /* the local index at which the search for any source starts */
    uint32_t next_sender;                  /* ... and for the next part of an offer */
    uint64_t kept_bytes, kept_limit_bytes; /* kept for offers without a receive, and again for eager messages */
};

void cl_transfers_init(struct cl_transfer_list *list);
void cl_transfers_append(struct cl_transfer_list *list, struct cl_transfer *transfer);
/* Takes the transfer at `at` out of the list. */
struct cl_transfer *cl_transfers_take(struct cl_transfer_list *list, struct cl_transfer **at);

/* Notes that the head of a transfer was sent or received. */
static inline void cl_transfer_begin(const struct cl_channels *channels, struct cl_transfer *transfer)
{
    transfer->first_us = channels->now_us;
}
/* Ends a transfer, or all of a list. */
void cl_channel_end(struct cl_channels *channels, struct cl_transfer *transfer, int status);
void cl_channel_end_all(struct cl_channels *channels, struct cl_transfer_list *list, int status);

/* Lets the other rank write so many more bytes of eager messages. */
void cl_channel_grant(struct cl_channel *channel, uint64_t bytes);
/* The other rank must be told of something. `urgent`: even if it has nothing in flight. */
void cl_channel_tell(struct cl_channels *channels, struct cl_channel *channel, bool urgent);
/* Tells local rank `index` now. */
void cl_channel_notify(struct cl_channels *channels, uint32_t index);
/* Writes an entry if `reserve` bytes stay free; otherwise asks for room, and returns false. */
bool cl_channel_write(struct cl_channels *channels, struct cl_channel *channel, const struct cl_ring_entry *entry,
                      const void *payload, uint64_t payload_bytes, uint64_t reserve);
