#include "congestion/peak.h"

static void begin_window(struct cl_peak *peak, uint64_t now_us)
{
    peak->began_us = now_us;
    peak->bytes = 0;
}

static void end_window(struct cl_peak *peak, uint64_t now_us)
{
    double rate = (double)peak->bytes * 1e6 / (double)(now_us - peak->began_us);
    peak->rates[peak->windows++ % CL_PEAK_WINDOWS] = (uint64_t)rate;
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
    uint32_t count = peak->windows < CL_PEAK_WINDOWS ? peak->windows : CL_PEAK_WINDOWS;
    if (count < CL_PEAK_PART)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t higher = 0, equal = 0;
        for (uint32_t j = 0; j < count; j++) {
            higher += peak->rates[j] > peak->rates[i];
            equal += peak->rates[j] == peak->rates[i];
        }
        uint32_t rank = (count - 1) / CL_PEAK_PART; /* of the wanted one, from 0 on */
        if (higher <= rank && rank < higher + equal)
            return peak->rates[i];
    }
    return 0;
}
