/*
 * Ledger: the receives to whose senders this process grants credit (credit.h), the most urgent first: by class, then by
 * the number of the message in its operation, then in turns.
 *
 * Only the first of equally urgent ones take turns: if all did, all would end late. In an all-to-all all do: there a
 * sender that has no turn at one receiver for long may have none at any, and its link idles. So as many take turns as
 * this process has sends that need credit, and at least TURNS_LEAST.
 */
#pragma once

#include "protocol/message.h"
#include "protocol/timers.h"

struct cl_ledger {
    uint64_t owed_bytes;             /* what all receives were granted, and has neither come nor been written off */
    uint32_t sends;                  /* sends of this process that need credit */
    uint32_t count;                  /* receives in the list */
    struct cl_receive *first, *last; /* posted and requested, with packets to be granted or owed */
    struct cl_timer timer;           /* looks for credit to write off */
};

/* Puts the receive behind all that are as urgent. */
void cl_ledger_add(struct cl_ledger *ledger, struct cl_receive *receive);
void cl_ledger_remove(struct cl_ledger *ledger, struct cl_receive *receive);
/* It was granted something: the others have their turn. */
void cl_ledger_pass_turn(struct cl_ledger *ledger, struct cl_receive *receive);
