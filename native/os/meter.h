/*
 * Meter: what this process has sent through each of its interfaces, and what it knows of their links, in a page of
 * memory that the other processes of the host read. The number of an interface is a hash of its address, so all
 * processes have the same number for it.
 *
 * The page is an anonymous memory file that others open through /proc. It is sealed: its size stays.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

enum {
    CL_METER_INTERFACES = 8,
    CL_METER_COUNTERS = 9, /* one for each class between hosts */
};

/* One interface, on cache lines of its own. */
struct cl_meter_line {
    _Alignas(64) _Atomic uint64_t key; /* 0: none */
    _Atomic uint64_t bytes[CL_METER_COUNTERS], lost, capacity, owed;
    _Atomic uint32_t depth_us;
};

struct cl_meter {
    struct cl_meter_line *lines; /* NULL: there is no meter */
    int fd;                      /* -1: of another process */
};

/* An error leaves the meter as it is, without lines. */
int cl_meter_open(struct cl_meter *meter);
/* Maps the page behind a descriptor of another process. CL_ESYSTEM: the process has ended, or the
 * descriptor is no meter. */
int cl_meter_read(int32_t pid, int32_t fd, struct cl_meter *meter);
void cl_meter_close(struct cl_meter *meter);

/* The number of the interface that has this address. */
uint64_t cl_meter_key(const char *address);
