/*
 * Conversation: three endpoints, the packets and messages between them, and the bytes of input that decide what happens
 * (command.h).
 */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "sim/driver.h"

enum {
    ENDPOINTS = 3,
    PATHS = 2,
    DATAGRAM_BYTES = 168, /* small: more packets for the same bytes */
    FLYING = 128,         /* packets on their way; with more the oldest are lost */
    RECORDED = 128,       /* packets remembered by the attacker */
    MESSAGES = 96,
    GROUPS = 3,
};

#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Sums over all conversations of the process. */
struct conversation_counters {
    uint64_t conversations;
    uint64_t packets; /* given to an endpoint; these are: */
    uint64_t genuine, rejected, insider;
    /* sums over all endpoints */
    uint64_t received, foreign, forged, replayed, unexpected, refused, duplicate, retransmitted, lost, acks, probes;
    uint64_t messages_done, messages_stopped, messages_failed, messages_cancelled, peers_lost, aborts;
};
extern struct conversation_counters conversation_counters;

struct flying {
    uint16_t to;
    uint32_t length;
    uint8_t bytes[DATAGRAM_BYTES];
};

/* One side of a message. */
struct half {
    bool open; /* posted, not yet complete */
    uint16_t self, peer;
    struct cl_message_id id;
    uint8_t *buffer;
    uint32_t length;
    struct half *other;
    bool sends, posted;
    struct cl_qos qos; /* a third of the messages may lose packets */
    bool ended_well;
    uint32_t lost; /* with ended_well: its lost packets, a bit each */
};

struct party {
    struct sim_driver driver; /* the first member: drivers are cast to parties */
    struct conversation *conversation;
};

struct conversation {
    const uint8_t *input;
    size_t length, at;
    struct sim_clock clock;
    struct party parties[ENDPOINTS];
    uint32_t sequence;
    bool insider; /* an insider took part: its packets may say anything */
    bool ended;   /* something was cancelled, aborted or lost: not everything can complete */
    struct flying flying[FLYING], recorded[RECORDED];
    uint32_t flying_count, recorded_count;
    struct half halves[2 * MESSAGES];
    uint32_t half_count;
    void (*complete)(struct conversation *c, const struct cl_completion *completion);
};

void conversation_begin(struct conversation *c);
void conversation_end(struct conversation *c);

/* The next byte of the input, and the next two; 0 after its end. */
uint32_t conversation_take(struct conversation *c);
uint32_t conversation_take_u16(struct conversation *c);

/* Gives bytes to an endpoint, and nothing more. */
void conversation_give(struct conversation *c, uint32_t to, const uint8_t *bytes, uint32_t length);
/* Lets the endpoint take a turn. */
void conversation_turn(struct conversation *c, uint32_t self);
void conversation_turn_all(struct conversation *c);

/* Takes one of the packets on their way, modulo their count, which is not 0. */
struct flying conversation_take_flying(struct conversation *c, uint32_t which);
/* Delivers one, if there is any. turn: the endpoint takes a turn at once. */
void conversation_deliver(struct conversation *c, uint32_t which, bool turn);

static inline uint64_t conversation_now_us(const struct conversation *c)
{
    return c->clock.now_ns / 1000;
}

static inline struct cl_endpoint *conversation_endpoint(const struct conversation *c, uint32_t self)
{
    return c->parties[self].driver.endpoint;
}
