#include "protocol/replay.h"

static uint64_t *word_of(struct cl_replay *replay, uint64_t number)
{
    return &replay->seen[number % CL_REPLAY_WINDOW / 64];
}

bool cl_replay_seen(const struct cl_replay *replay, uint64_t number)
{
    return number < replay->next && (number + CL_REPLAY_WINDOW < replay->next ||
                                     replay->seen[number % CL_REPLAY_WINDOW / 64] >> number % 64 & 1);
}

bool cl_replay_admit(struct cl_replay *replay, uint64_t number)
{
    uint64_t bit = (uint64_t)1 << number % 64;
    if (cl_replay_seen(replay, number))
        return false;
    if (number >= replay->next) {
        /* numbers that were skipped have not been seen */
        uint64_t skipped = number - replay->next < CL_REPLAY_WINDOW ? number - replay->next : CL_REPLAY_WINDOW;
        for (uint64_t each = number - skipped; each < number; each++)
            *word_of(replay, each) &= ~((uint64_t)1 << each % 64);
        replay->next = number + 1;
    }
    *word_of(replay, number) |= bit;
    return true;
}

bool cl_replay_near(struct cl_replay *replay, uint64_t number)
{
    if (number <= replay->next + CL_REPLAY_AHEAD_MAX)
        return true;
    uint64_t before = replay->far;
    replay->far = number;
    return before && number > before && number - before <= CL_REPLAY_WINDOW;
}
