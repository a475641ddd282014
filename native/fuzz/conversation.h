/*
 * Conversation: three endpoints that exchange messages while a stranger, and an insider who knows the key, do to their
 * packets what an input of bytes says. Both fuzzers feed it: libfuzzer.c and main.c.
 *
 * The bytes are commands: deliver a packet, reorder, drop, repeat, redirect, damage, make one up, seal it or not; post
 * messages, cancel, abort; let time pass. What must hold is checked on the way, and ends the process when it does not:
 *  - a packet that is damaged, made up, redirected or repeated changes one counter of its receiver, and nothing else;
 *  - memory stays within its bounds; buffers are not touched once their message is complete or cancelled;
 *  - as long as no insider took part, every message completes, with the right bytes, or its peer is lost; one with a
 *    bound without the same packets on both sides, and no more than that.
 */
#ifndef CL_FUZZ_CONVERSATION_H
#define CL_FUZZ_CONVERSATION_H

#include <stddef.h>
#include <stdint.h>

/* Of all conversations of the process. */
struct conversation_counters {
    uint64_t conversations;
    uint64_t packets; /* given to an endpoint; of those: */
    uint64_t genuine, rejected, insider;
    /* of all endpoints */
    uint64_t received, foreign, forged, replayed, unexpected, refused, duplicate, retransmitted, lost, acks, probes;
    uint64_t messages_done, messages_stopped, messages_failed, messages_cancelled, peers_lost, aborts;
};
extern struct conversation_counters conversation_counters;

void conversation_run(const uint8_t *input, size_t length);

#endif
