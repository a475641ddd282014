#include "congestion/cubic.h"

#include <math.h>

static const double BETA = 0.7, C = 0.4, GROWTH_MOST = 1.5, GROWTH_LEAST = 0.01;

void cl_cubic_init(struct cl_cubic *cubic, double window)
{
    *cubic = (struct cl_cubic){.window = fmax(window, CL_CUBIC_WINDOW_LEAST)};
}

void cl_cubic_cut(struct cl_cubic *cubic)
{
    cubic->before = cubic->window < cubic->before ? cubic->window * (1 + BETA) / 2 : cubic->window;
    cubic->window = fmax(BETA * cubic->window, CL_CUBIC_WINDOW_LEAST);
    cubic->began_us = 0;
}

void cl_cubic_grow(struct cl_cubic *cubic, double packets, uint32_t round_us, uint64_t now_us)
{
    if (!cubic->began_us) {
        cubic->began_us = now_us;
        cubic->reno = cubic->window;
        cubic->k_s = cubic->before > cubic->window ? cbrt((cubic->before - cubic->window) / C) : 0;
        cubic->origin = fmax(cubic->before, cubic->window);
    }
    double s = (double)(now_us - cubic->began_us + round_us) / 1e6 - cubic->k_s;
    double wanted = fmin(cubic->origin + C * s * s * s, GROWTH_MOST * cubic->window);
    double increase = cubic->reno < cubic->before ? 3 * (1 - BETA) / (1 + BETA) : 1;
    cubic->reno += increase * packets / cubic->window;
    double missing = fmax(wanted, cubic->reno) - cubic->window;
    cubic->window += fmax(missing, GROWTH_LEAST) * fmin(packets / cubic->window, 1);
}
