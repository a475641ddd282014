/*
 * Clock: the monotonic time of this machine, in microseconds.
 */
#pragma once

#include <stdint.h>
#include <time.h>

static inline uint64_t cl_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}
