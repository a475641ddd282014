/*
 * Doorbell: how ranks of one host tell each other of messages. Each rank has one, in the memory that they share.
 *
 * Ringing it wakes the threads of the owner that wait there for a message. If there are none, the owner's engine must
 * be woken by its bell (host.h): of every message, if the engine listens to all, else only of a request, by a rank that
 * cannot go on alone.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum cl_doorbell_wish { CL_DOORBELL_NONE, CL_DOORBELL_REQUESTS, CL_DOORBELL_ALL };

struct cl_doorbell {
    _Alignas(128) _Atomic uint32_t rings; /* futex word */
    _Atomic uint32_t requests;
    _Atomic uint32_t attendants; /* threads of the owner that look at `rings`, asleep or not */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t wish; /* the wish of the owner's engine; back to NONE when its bell is rung */
    /* The owner's process, and a number in its memory by which others see that they read that and no other process. */
    _Atomic int32_t pid; /* 0: its memory must not be read */
    _Atomic uint64_t proof, proof_address;
    _Atomic uint64_t bell_key; /* the key of the owner's bell: see bell.h */
};

/* Returns whether the owner's bell must be rung. */
bool cl_doorbell_ring(struct cl_doorbell *doorbell, bool request);
/* Wakes the threads that sleep at the doorbell. */
void cl_doorbell_wake(struct cl_doorbell *doorbell);
/* Sleeps until it was rung more than `seen` times, *done is not 0, which its writer follows by cl_doorbell_wake, or
 * timeout_us passed. May return early. */
void cl_doorbell_sleep(struct cl_doorbell *doorbell, uint32_t seen, const _Atomic uint32_t *done, uint64_t timeout_us);
