/*
 * Packet wait: how calling threads wait for packets. One of those that wait polls the sockets of its process instead of
 * the engine's thread, and takes the engine's turns. So what a packet brings needs no switch from that thread to this
 * one. While packets come in bulk it leaves the sockets to the engine's thread, which paces and naps.
 *
 * It outlives its engine, since an operation may be waited for after its engine has been closed.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "wire/wire.h"

struct cl_engine;

struct cl_packet_wait {
    atomic_uint references;                       /* the engine's, and of operations */
    atomic_uint inside;                           /* threads that poll or are about to */
    atomic_uint sleepers;                         /* threads that wait, but do not poll */
    atomic_bool closed;                           /* the engine may be gone */
    _Atomic(const _Atomic uint32_t *) sleeps_for; /* the word that ends its sleep; NULL: it does not sleep */
    struct cl_engine *engine;
    _Atomic uint64_t ended_us; /* when the latest wait ended */
    uint64_t sleep_most_us;    /* a lost wake-up costs this much, never a hang */
    uint32_t port_count;
    atomic_int port_fds[CL_PORTS_MAX];
    int wake_fd; /* ends its sleep */
};

/* For the ports of the engine's wire, which is open. NULL: no memory, or no descriptor. */
struct cl_packet_wait *cl_packet_wait_create(struct cl_engine *engine);
void cl_packet_wait_retain(struct cl_packet_wait *wait);
/* NULL is accepted. */
void cl_packet_wait_release(struct cl_packet_wait *wait);
/* Sends the threads away. The engine may be freed afterwards. */
void cl_packet_wait_close(struct cl_packet_wait *wait);

/* Polls the sockets until *done is not 0, the engine is closed, the deadline has passed, or packets come in bulk. Not
 * at all while another calling thread does, nor after a pause if the engine's thread is busy. */
void cl_packet_wait_for(struct cl_packet_wait *wait, const _Atomic uint32_t *done, uint64_t deadline_us);
/* Notes that a wait has ended. If the next one begins soon, nobody polls for a while after that, as a third one mostly
 * follows. */
void cl_packet_wait_note(struct cl_packet_wait *wait);
/* The word is not 0 any more: ends the sleep of a thread that polls and waits for that. */
void cl_packet_wait_end(struct cl_packet_wait *wait, const _Atomic uint32_t *done);
/* A port has got another descriptor. */
void cl_packet_wait_move(struct cl_packet_wait *wait, uint32_t port, int fd);
