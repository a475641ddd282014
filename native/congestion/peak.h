/*
 * Peak: the highest rate at which bytes passed an interface lately, as an average of CL_PEAK_WINDOW_US. While a
 * collective is limited by another host's link, most of its time says nothing about this one; its fastest moments do.
 * The window is long beside the delays of hosts and the bursts of switches.
 *
 * A pause ends a window without a measurement. The highest of the last HALF_WINDOWS windows to twice as many counts.
 */
#ifndef CL_CONGESTION_PEAK_H
#define CL_CONGESTION_PEAK_H

#include <stdint.h>

enum { CL_PEAK_WINDOW_US = 50000, CL_PEAK_PAUSE_US = 20000 };

struct cl_peak {
    uint64_t began_us, latest_us, bytes; /* of the current window, which began with a passage that is not counted */
    uint32_t windows;
    double rate, rate_before; /* bytes per second: the highest of this half, and of the one before */
};

/* So many bytes have passed. */
void cl_peak_see(struct cl_peak *peak, uint64_t bytes, uint64_t now_us);

/* Bytes per second; 0: not known yet. */
uint64_t cl_peak_rate(const struct cl_peak *peak);

#endif
