#include "protocol/ledger.h"

enum { TURNS_LEAST = 32 /* messages that take turns */ };

static bool goes_before(const struct cl_receive *a, const struct cl_receive *b)
{
    return a->credit.class != b->credit.class ? a->credit.class < b->credit.class
                                              : a->message.id.index < b->message.id.index;
}

static void insert(struct cl_ledger *ledger, struct cl_receive *before, struct cl_receive *receive)
{
    receive->credit.listed = true;
    receive->credit.previous = before;
    receive->credit.next = before != NULL ? before->credit.next : ledger->first;
    *(before != NULL ? &before->credit.next : &ledger->first) = receive;
    *(receive->credit.next != NULL ? &receive->credit.next->credit.previous : &ledger->last) = receive;
    ledger->count++;
}

void cl_ledger_add(struct cl_ledger *ledger, struct cl_receive *receive)
{
    struct cl_receive *before = ledger->last;
    while (before != NULL && goes_before(receive, before))
        before = before->credit.previous;
    insert(ledger, before, receive);
}

void cl_ledger_remove(struct cl_ledger *ledger, struct cl_receive *receive)
{
    struct cl_receive *previous = receive->credit.previous, *next = receive->credit.next;
    *(previous != NULL ? &previous->credit.next : &ledger->first) = next;
    *(next != NULL ? &next->credit.previous : &ledger->last) = previous;
    receive->credit.listed = false;
    ledger->count--;
}

void cl_ledger_pass_turn(struct cl_ledger *ledger, struct cl_receive *receive)
{
    struct cl_receive *before = receive;
    uint32_t turns = ledger->sends > TURNS_LEAST ? ledger->sends : TURNS_LEAST;
    for (uint32_t i = 1; i < turns && before->credit.next != NULL && !goes_before(receive, before->credit.next); i++)
        before = before->credit.next;
    if (before == receive)
        return;
    cl_ledger_remove(ledger, receive);
    insert(ledger, before, receive);
}
