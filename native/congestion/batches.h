/*
 * Batches: whether the packets of an interface leave in batches, as many at once as its pacer gathers, or without. The
 * kernel handles a batch to one peer as one packet, which costs the host's processor much less. But the buffer of a
 * port may be too short for a batch, and then a part of each batch is lost: too little for the sender to slow down.
 * Losses that the link itself causes do not depend on batches. So where packets are lost, the sender makes a loss
 * trial: it sends without batches. If more than half of the losses stop, it sends none for some time. Otherwise it
 * sends batches again.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "congestion/loss_trial.h"

struct cl_batches {
    struct cl_loss_trial trial;
    uint64_t settles_us; /* losses that are found until then may be of packets that left before the last trial */
    uint64_t single_until_us;
};

void cl_batches_init(struct cl_batches *batches);
/* Packets that were acknowledged, or found to be lost at the same time. */
static inline void cl_batches_count(struct cl_batches *batches, uint32_t acked, uint32_t lost)
{
    cl_loss_trial_count(&batches->trial, acked, lost);
}
/* The caller asks for it once a round trip or so. round_trip_us: the longest of the interface. */
void cl_batches_judge(struct cl_batches *batches, uint32_t round_trip_us, uint64_t now_us);
/* Forgets the packets counted so far, and ends a trial: the caller has changed something else, which may be the reason
 * why losses begin or stop. */
void cl_batches_forget(struct cl_batches *batches);

static inline bool cl_batches_wanted(const struct cl_batches *batches, uint64_t now_us)
{
    return !batches->trial.trial && now_us >= batches->single_until_us;
}
