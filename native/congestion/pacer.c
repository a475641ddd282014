#include "congestion/pacer.h"

static const int64_t MILLION = 1000000;

static void refill(struct cl_pacer *pacer, uint64_t now_us)
{
    if (now_us <= pacer->last_us)
        return;
    int64_t full = (int64_t)pacer->burst * MILLION;
    uint64_t elapsed_us = now_us - pacer->last_us;
    pacer->last_us = now_us;
    /* after long pauses the product would not fit in 64 bits */
    if ((double)pacer->rate * (double)elapsed_us >= (double)(full - pacer->tokens))
        pacer->tokens = full;
    else
        pacer->tokens += (int64_t)(pacer->rate * elapsed_us);
}

void cl_pacer_init(struct cl_pacer *pacer, uint64_t rate, uint64_t burst, uint64_t now_us)
{
    *pacer = (struct cl_pacer){.rate = rate, .burst = burst, .tokens = (int64_t)burst * MILLION, .last_us = now_us};
}

void cl_pacer_set(struct cl_pacer *pacer, uint64_t rate, uint64_t burst, uint64_t now_us)
{
    refill(pacer, now_us);
    pacer->rate = rate;
    pacer->burst = burst;
    if (pacer->tokens > (int64_t)burst * MILLION)
        pacer->tokens = (int64_t)burst * MILLION;
}

uint64_t cl_pacer_ready_us(struct cl_pacer *pacer, bool urgent, uint64_t now_us)
{
    if (!pacer->rate)
        return now_us;
    refill(pacer, now_us);
    int64_t tokens = pacer->tokens + (urgent ? (int64_t)pacer->burst * MILLION : 0);
    int64_t batch = (int64_t)cl_pacer_batch(pacer) * MILLION;
    bool ready = tokens >= batch || (tokens > 0 && (urgent || !pacer->batches || !pacer->gathers));
    if (!urgent)
        pacer->gathers = !ready;
    return ready ? now_us : now_us + (uint64_t)(batch - tokens) / pacer->rate + 1;
}

uint64_t cl_pacer_batch(const struct cl_pacer *pacer)
{
    return pacer->burst / 4;
}

bool cl_pacer_is_full(const struct cl_pacer *pacer)
{
    return pacer->tokens >= (int64_t)pacer->burst * MILLION;
}

void cl_pacer_sent(struct cl_pacer *pacer, uint32_t bytes)
{
    if (pacer->rate)
        pacer->tokens -= (int64_t)bytes * MILLION;
}
