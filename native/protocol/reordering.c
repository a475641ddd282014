#include "protocol/reordering.h"

void cl_reordering_disprove(struct cl_reordering *reordering, uint64_t needed)
{
    reordering->undisputed = 0;
    if (needed > CL_REORDERING_THRESHOLD_MAX)
        needed = CL_REORDERING_THRESHOLD_MAX;
    if (needed > cl_reordering_threshold(reordering))
        reordering->more = (uint32_t)needed - CL_REORDERING_THRESHOLD;
    if (reordering->longer < CL_REORDERING_SHIFT)
        reordering->longer++;
}

void cl_reordering_count_round(struct cl_reordering *reordering)
{
    if (++reordering->undisputed < CL_REORDERING_PERSIST)
        return;
    reordering->undisputed = 0;
    reordering->more /= 2;
    if (reordering->longer > 0)
        reordering->longer--;
}
