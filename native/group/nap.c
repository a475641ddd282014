#include "group/nap.h"

void cl_nap_arrived(struct cl_nap *nap, uint64_t at_us)
{
    uint64_t pause_us = nap->shared ? CL_NAP_PAUSE_SHARED_US : CL_NAP_PAUSE_US;
    if (!nap->begun || at_us > nap->last_us + pause_us) {
        nap->begun = true;
        nap->start_us = nap->last_us = at_us;
        nap->packets = 0;
        return;
    }
    nap->last_us = at_us > nap->last_us ? at_us : nap->last_us;
    if (++nap->packets < CL_NAP_BATCH)
        return;
    nap->spacing_us = (double)(nap->last_us - nap->start_us) / CL_NAP_BATCH;
    bool bulk = nap->spacing_us <= (nap->shared ? CL_NAP_SPACING_SHARED_US : CL_NAP_SPACING_US);
    nap->batched_us = bulk ? nap->last_us : 0;
    nap->start_us = nap->last_us;
    nap->packets = 0;
}

uint64_t cl_nap_us(struct cl_nap *nap, uint64_t lacking, bool urgent, uint64_t now_us)
{
    if (lacking == 0 || lacking == UINT64_MAX)
        nap->begun = false;
    if (!nap->begun || nap->batched_us == 0 || now_us > nap->batched_us + CL_NAP_STEADY_US || lacking <= CL_NAP_SPARE)
        return 0;
    uint64_t packets = lacking - CL_NAP_SPARE < CL_NAP_BATCH ? lacking - CL_NAP_SPARE : CL_NAP_BATCH;
    uint64_t until_us = nap->last_us + (uint64_t)((double)packets * nap->spacing_us);
    if (until_us < now_us + CL_NAP_LEAST_US)
        return 0;
    uint64_t most_us = urgent ? CL_NAP_MOST_URGENT_US : CL_NAP_MOST_US;
    return until_us - now_us < most_us ? until_us - now_us : most_us;
}
