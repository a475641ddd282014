#include "congestion/peak.h"

enum { HALF_WINDOWS = 32 };

static void begin_window(struct cl_peak *peak, uint64_t now_us)
{
    peak->began_us = now_us;
    peak->bytes = 0;
}

static void end_window(struct cl_peak *peak, uint64_t now_us)
{
    double rate = (double)peak->bytes * 1e6 / (double)(now_us - peak->began_us);
    if (++peak->windows % HALF_WINDOWS == 0) {
        peak->rate_before = peak->rate;
        peak->rate = 0;
    }
    peak->rate = rate > peak->rate ? rate : peak->rate;
    begin_window(peak, now_us);
}

void cl_peak_see(struct cl_peak *peak, uint64_t bytes, uint64_t now_us)
{
    now_us = now_us > peak->latest_us ? now_us : peak->latest_us;
    if (!peak->latest_us || now_us - peak->latest_us > CL_PEAK_PAUSE_US) {
        begin_window(peak, now_us);
    } else {
        peak->bytes += bytes;
        if (now_us - peak->began_us >= CL_PEAK_WINDOW_US)
            end_window(peak, now_us);
    }
    peak->latest_us = now_us;
}

uint64_t cl_peak_rate(const struct cl_peak *peak)
{
    return (uint64_t)(peak->rate > peak->rate_before ? peak->rate : peak->rate_before);
}
