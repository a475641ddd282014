/*
 * Port set: the sockets of a process as one descriptor, on which the engine's thread sleeps. Any thread can turn it off
 * and on again in that sleep. Only to be turned on while a socket is readable wakes the engine's thread.
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
    bool opened; /* the lock is there, and the descriptors, or -1 */
    uint32_t count;
    pthread_mutex_t turning;
    atomic_bool on;
};

/* Opens the set, turned off. CL_ESYSTEM: there is no descriptor left; cl_port_set_close is called all the same. */
int cl_port_set_open(struct cl_port_set *set);
void cl_port_set_close(struct cl_port_set *set);
/* Ports are numbered from 0. CL_ESYSTEM: the kernel has no memory. */
int cl_port_set_add(struct cl_port_set *set, uint32_t port, int fd);
/* Call this before a port's descriptor is closed, for another one. A copy in a forked process would keep it in the
 * set. */
void cl_port_set_remove(struct cl_port_set *set, int fd);
/* Any thread. */
void cl_port_set_turn(struct cl_port_set *set, bool on);
/* The readable ports, a bit each. Call this once the set's descriptor is readable: a single port is not looked at. */
uint64_t cl_port_set_readable(const struct cl_port_set *set);
