/*
 * Sent: the packets of one path that are in flight, by packet number. It alone decides their fate: each packet leaves
 * exactly once, as acknowledged, refused or lost.
 *
 * A ring indexed by number: it covers [low, next), where `low` is the lowest packet still in flight.
 */
#pragma once

#include "congestion/congestion.h"
#include "protocol/control.h"

struct cl_send;

struct cl_sent_packet {
    uint64_t sent_us;
    struct cl_congestion_packet congestion;
    union {
        struct {
            struct cl_send *send; /* valid only while its generation is still `generation` */
            uint32_t generation;
            uint32_t packet; /* its number within the message */
        } data;
        struct cl_control control; /* to send it again if it is lost */
    };
    uint16_t bytes;          /* bytes of the datagram, or of all its fragments */
    uint16_t datagram_bytes; /* bytes of the datagram, or of its largest fragment */
    uint8_t kind;            /* enum cl_packet_kind */
    uint8_t class;
    bool again; /* not the first packet with its data */
    bool in_flight;
};

struct cl_sent {
    struct cl_sent_packet *ring;
    uint32_t capacity;                              /* a power of two */
    uint32_t packets;                               /* in flight */
    uint32_t pings;                                 /* PINGs among those: nothing waits for them */
    uint64_t bytes;                                 /* in flight */
    uint64_t class_bytes[CL_CLASSES_BETWEEN_HOSTS]; /* the same by class */
    uint64_t low, next;
    uint64_t last_sent_us; /* when a packet that is not a PING was last sent */
};

/* Takes the number `sent->next`. False when there is no memory; then the packet must not be sent. */
bool cl_sent_push(struct cl_sent *sent, const struct cl_sent_packet *packet);
/* NULL when the number is not in flight. */
struct cl_sent_packet *cl_sent_find(const struct cl_sent *sent, uint64_t number);
/* Takes a packet that is in flight out; its contents stay readable until the next push. */
void cl_sent_remove(struct cl_sent *sent, uint64_t number);
/* Forgets everything in flight, and frees the memory. The numbers go on: one used twice would be taken for a replay. */
void cl_sent_free(struct cl_sent *sent);
