#include "protocol/budget.h"

#include "commlayer.h"

enum {
    START_BYTES = 1 << 20, /* until the interfaces and the rounds were measured */
    LEAST_BYTES = 1 << 15, /* two GRANTs */
    MOST_BYTES = 1 << 30,  /* as in the settings */
};

static const double ROUNDS = 1.5;
static const double WEIGHT = 1.0 / 64; /* of one measurement: there are many peers */

void cl_budget_init(struct cl_budget *budget, uint64_t bytes)
{
    bool derived = bytes == CL_CREDIT_DERIVED;
    *budget = (struct cl_budget){.bytes = derived ? START_BYTES : bytes, .derived = derived};
}

void cl_budget_measure(struct cl_budget *budget, double capacity, double round_us)
{
    if (!budget->derived || capacity <= 0)
        return;
    budget->round_us += (budget->round_us > 0 ? WEIGHT : 1) * (round_us - budget->round_us);
    double bytes = ROUNDS * capacity * budget->round_us / 1e6;
    budget->bytes = bytes < LEAST_BYTES ? LEAST_BYTES : bytes < MOST_BYTES ? (uint64_t)bytes : MOST_BYTES;
}

void cl_budget_hear(struct cl_budget *budget, uint32_t neighbour, uint64_t owed_bytes)
{
    if (neighbour >= CL_NEIGHBOURS_MAX)
        return;
    while (budget->heard <= neighbour)
        budget->owed[budget->heard++] = 0;
    budget->owed[neighbour] = owed_bytes < MOST_BYTES ? owed_bytes : MOST_BYTES; /* another process wrote it */
}

void cl_budget_heard(struct cl_budget *budget)
{
    budget->others_bytes = budget->others = 0;
    for (uint32_t i = 0; i < budget->heard; i++) {
        budget->others_bytes += budget->owed[i];
        budget->others += budget->owed[i] > 0;
    }
    budget->heard = 0;
}

uint64_t cl_budget_share(const struct cl_budget *budget)
{
    uint64_t equal = budget->bytes / (budget->others + 1);
    uint64_t rest = budget->bytes > budget->others_bytes ? budget->bytes - budget->others_bytes : 0;
    return rest > equal ? rest : equal;
}
