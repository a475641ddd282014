#include "congestion/batches.h"

enum {
    TRIAL_PACKETS = 2000,
    SETTLE_US = 20000,
    SINGLE_US = 1000000,
};

static const double LOSS_LEAST = 0.01; /* a smaller share is not worth a trial */

void cl_batches_init(struct cl_batches *batches)
{
    *batches = (struct cl_batches){.trial = {.least = LOSS_LEAST, .enough = TRIAL_PACKETS}};
}

void cl_batches_judge(struct cl_batches *batches, uint64_t now_us)
{
    if (now_us < batches->settles_us || now_us < batches->single_until_us) {
        cl_batches_skip(batches);
        return;
    }
    bool tried = batches->trial.trial;
    enum cl_loss_trial_verdict verdict = cl_loss_trial_judge(&batches->trial, false);
    if (verdict == CL_LOSS_TRIAL_FULL && batches->trial.trial)
        batches->settles_us = now_us + SETTLE_US;
    else if (verdict == CL_LOSS_TRIAL_FULL || (tried && verdict == CL_LOSS_TRIAL_NONE && !batches->trial.trial))
        batches->single_until_us = now_us + SINGLE_US;
}

void cl_batches_skip(struct cl_batches *batches)
{
    cl_loss_trial_skip(&batches->trial);
}
