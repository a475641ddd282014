/*
 * Command: three endpoints exchange messages while an attacker, and an insider with the key, do to their packets what
 * the bytes of an input say. Both fuzzers run it: libfuzzer.c and main.c.
 *
 * The bytes are commands: deliver, reorder, drop, repeat, redirect, damage or make up a packet, sealed or not; post
 * messages, cancel, abort; let time pass. A broken invariant ends the process:
 *  - a damaged, made-up, redirected or repeated packet changes one counter of its receiver, and nothing else;
 *  - memory stays within its limits; buffers are not touched once their message is complete or cancelled;
 *  - without an insider every message completes with the right bytes, or its peer is lost; both sides of a partial
 *    message miss the same packets, no more than its loss bound allows.
 */
#pragma once

#include "fuzz/conversation.h"

/* A whole conversation. */
void command_run(const uint8_t *input, size_t length);
