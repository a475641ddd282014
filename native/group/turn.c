#include "group/turn.h"

/* Tells the groups which messages have ended, and which groups other ranks have aborted. Returns whether there was
 * anything: operations can go on. */
static bool hear(const struct cl_turn *turn)
{
    bool any = false;
    struct cl_completion completion;
    while (cl_endpoint_next_completion(turn->endpoint, &completion)) {
        any = true;
        if (turn->io->completed != NULL)
            turn->io->completed(turn->context, &completion);
        cl_group_complete(&completion);
    }
    struct cl_closed_group aborted;
    while (cl_endpoint_next_abort(turn->endpoint, &aborted)) {
        any = true;
        if (turn->io->aborted != NULL)
            turn->io->aborted(turn->context, &aborted);
        cl_groups_hear_of(turn->groups, &aborted);
    }
    return any;
}

static void run_timers(const struct cl_turn *turn)
{
    uint64_t now_us = turn->io->now_us(turn->context);
    if (cl_endpoint_next_timeout(turn->endpoint) > now_us)
        return;
    cl_endpoint_timeout(turn->endpoint, now_us);
    if (turn->io->expired != NULL)
        turn->io->expired(turn->context);
}

uint64_t cl_turn_take(const struct cl_turn *turn)
{
    const struct cl_turn_io *io = turn->io;
    uint64_t deadline_us = UINT64_MAX;
    io->take(turn->context);
    io->receive(turn->context);
    io->report_deaths(turn->context);
    if (turn->endpoint != NULL) {
        run_timers(turn);
        hear(turn);
    }
    bool more = cl_groups_progress(turn->groups, io->now_us(turn->context), &deadline_us);
    if (turn->endpoint != NULL) {
        more |= io->send(turn->context);
        more |= hear(turn); /* of messages that had come before their receive was posted */
        uint64_t next_us = cl_endpoint_next_timeout(turn->endpoint);
        deadline_us = next_us < deadline_us ? next_us : deadline_us;
    }
    cl_news_tell(turn->news);
    return more || !cl_groups_arm_bells(turn->groups, io->now_us(turn->context), &deadline_us) ? 0 : deadline_us;
}
