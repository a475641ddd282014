/*
 * Peak: the rate at which bytes passed an interface in its fastest moments of lately. While a collective is limited by
 * another host's link, most of its time says nothing about this one. The time is cut into windows, which are long
 * beside the delays of hosts and the bursts of switches; the peak is the rate that one in CL_PEAK_PART of the last
 * CL_PEAK_WINDOWS windows has reached. The very fastest one would overrate a link that others use, too.
 *
 * A pause ends a window without a measurement. Fewer than CL_PEAK_PART windows tell no rate: the first ones hold the
 * start of the transport, which measures the link as it sends.
 */
#pragma once

#include <stdint.h>

enum { CL_PEAK_WINDOW_US = 50000, CL_PEAK_PAUSE_US = 20000, CL_PEAK_WINDOWS = 48, CL_PEAK_PART = 8 };

struct cl_peak {
    uint64_t began_us, latest_us, bytes; /* of the current window, which began with a passage that is not counted */
    uint32_t windows;                    /* measured so far */
    uint64_t rates[CL_PEAK_WINDOWS];     /* bytes per second, of the latest */
};

/* So many bytes have passed. */
void cl_peak_see(struct cl_peak *peak, uint64_t bytes, uint64_t now_us);

/* Bytes per second; 0: not known yet, before CL_PEAK_PART windows. */
uint64_t cl_peak_rate(const struct cl_peak *peak);
