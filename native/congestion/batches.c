#include "congestion/batches.h"

enum {
    TRIAL_PACKETS = 8000, /* 250 long batches: a few of them may be lost by chance */
    SINGLE_US = 1000000,  /* without batches: after a trial that succeeded, and the longest trial */
};

static const double LOSS_LEAST = 0.01; /* a smaller share is not worth a trial */
static const double BURSTS_LEAST = 6;

void cl_batches_init(struct cl_batches *batches)
{
    *batches = (struct cl_batches){.trial = {.least = LOSS_LEAST, .bursts = BURSTS_LEAST, .enough = TRIAL_PACKETS}};
}

void cl_batches_judge(struct cl_batches *batches, uint32_t round_trip_us, uint64_t now_us)
{
    struct cl_loss_trial *trial = &batches->trial;
    if (now_us < batches->settles_us || now_us < batches->single_until_us) {
        cl_loss_trial_skip(trial);
        return;
    }
    bool tried = trial->trial;
    if (tried && now_us >= batches->settles_us + SINGLE_US) {
        cl_batches_forget(batches); /* too few packets for a verdict */
        return;
    }
    enum cl_loss_trial_verdict verdict = cl_loss_trial_judge(trial, false);
    if (!tried && trial->trial) {
        batches->settles_us = now_us + cl_loss_trial_settle_us(round_trip_us);
    } else if (verdict == CL_LOSS_TRIAL_FULL || (tried && verdict == CL_LOSS_TRIAL_NONE && !trial->trial)) {
        trial->trial = false; /* most losses have stopped; what is left may be too much all the same */
        batches->single_until_us = now_us + SINGLE_US;
    }
}

void cl_batches_forget(struct cl_batches *batches)
{
    batches->trial.trial = false;
    cl_loss_trial_skip(&batches->trial);
}
