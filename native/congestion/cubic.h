/*
 * Cubic: the window of TCP's congestion control after RFC 9438, in packets. Whoever uses it says when packets were
 * acknowledged, and when some were lost, once per round trip. It has no slow start.
 */
#pragma once

#include <stdint.h>

enum { CL_CUBIC_WINDOW_LEAST = 2 };

struct cl_cubic {
    double window;
    double before;     /* the window before the last cut: W_max */
    double origin;     /* the window in which it stops growing for a while */
    double reno;       /* the window of a flow of Reno: W_est */
    double k_s;        /* time from the last cut to the origin */
    uint64_t began_us; /* the growth after the last cut; 0: it begins with the next acknowledgement */
};

void cl_cubic_init(struct cl_cubic *cubic, double window);
/* packets: newly acknowledged; the window was the limit. round_us: round trip of the empty network. */
void cl_cubic_grow(struct cl_cubic *cubic, double packets, uint32_t round_us, uint64_t now_us);
void cl_cubic_cut(struct cl_cubic *cubic);
