/*
 * Control: the small reliable packets (READY, ABORT, MISMATCH, PROBE, STOP) that wait to be sent to one peer. Equal
 * packets are queued once. A packet that was sent lives in cl_sent until it is acknowledged; a lost one is queued
 * again.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "protocol/index.h"
#include "protocol/message_id.h"
#include "protocol/packet.h"

/* The content of a control packet or a PING; zero where its kind has no use for it. */
struct cl_control {
    uint32_t group;
    union {
        struct { /* all kinds but ABORT: an operation, or one message of it */
            uint32_t sequence, index;
            uint32_t first_packet; /* STOP: the first of the packets that it reports */
        };
        struct { /* ABORT */
            int32_t reason;
            uint16_t culprit; /* a peer; UINT16_MAX: not known */
        };
    };
};

struct cl_control_entry {
    struct cl_control control;
    uint8_t kind; /* enum cl_packet_kind */
    struct cl_control_entry *next;
    struct cl_index_place place; /* under its content */
};

struct cl_controls {
    struct cl_control_entry *first, *last; /* first in, first out */
    struct cl_index contents;
    uint32_t count;
};

/* The content of a packet about one message. */
static inline struct cl_control cl_control_message(const struct cl_message_id *id)
{
    return (struct cl_control){.group = id->group, .sequence = id->sequence, .index = id->index};
}

/* The content of an ABORT. culprit: a peer; UINT16_MAX: not known. */
static inline struct cl_control cl_control_abort(uint32_t group, int32_t reason, uint16_t culprit)
{
    return (struct cl_control){.group = group, .reason = reason, .culprit = culprit};
}

/* The message that a packet of any kind but ABORT is about. */
static inline struct cl_message_id cl_control_id(const struct cl_control *control)
{
    return (struct cl_message_id){control->group, control->sequence, control->index};
}

/* Fills the fields of a packet in which its kind carries the content, as packet.h lists them. */
void cl_control_write(const struct cl_control *control, struct cl_packet *packet);
/* The content of a packet that came. */
struct cl_control cl_control_read(const struct cl_packet *packet);

/* False when there is no memory. */
bool cl_controls_push(struct cl_controls *controls, uint8_t kind, const struct cl_control *control);
/* Takes the first one out; false when there is none. */
bool cl_controls_pop(struct cl_controls *controls, struct cl_control_entry *entry);
void cl_controls_free(struct cl_controls *controls);
