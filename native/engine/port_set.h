/*
 * Port set: the sockets of a process as one descriptor, on which the engine's thread sleeps. Any thread can turn it off
 * and on again, also while the engine's thread is asleep, and without waking it.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "wire/wire.h"

struct cl_port_set {
    int all;     /* readable while a port is */
    int fd;      /* the same, but never while the set is off */
    bool opened; /* the lock is there */
    uint32_t count;
    pthread_mutex_t turning;
    atomic_bool on;
};

/* The set is off. CL_ESYSTEM: there is no descriptor left. cl_port_set_close also after a failure. */
int cl_port_set_open(struct cl_port_set *set);
void cl_port_set_close(struct cl_port_set *set);
/* Ports are numbered from 0. CL_ESYSTEM: the kernel has no memory. */
int cl_port_set_add(struct cl_port_set *set, uint32_t port, int fd);
/* A port is about to get another descriptor, and this one to be closed. A copy of it, as in a forked process, would
 * keep it in the set. */
void cl_port_set_remove(struct cl_port_set *set, int fd);
/* Any thread. */
void cl_port_set_turn(struct cl_port_set *set, bool on);
/* The readable ports, a bit each, once the descriptor of the set is readable. */
uint64_t cl_port_set_readable(const struct cl_port_set *set);
