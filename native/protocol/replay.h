/*
 * Replay: the packet numbers of one sender that have been seen, so that each packet is taken once: a sliding window as
 * in RFC 6479. Numbers below the window count as seen: a packet that late has been sent again under another number. A
 * zeroed struct has seen nothing.
 *
 * Where packets are not authenticated, one damaged number far ahead would make all others look old. There, a number
 * more than CL_REPLAY_AHEAD_MAX ahead is admitted only after another one shortly before it: a path may have been down
 * for days while its sender went on.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    CL_REPLAY_WINDOW = 2048,
    CL_REPLAY_AHEAD_MAX = 1 << 20, /* more than any window */
};

struct cl_replay {
    uint64_t next;                        /* the number above everything seen */
    uint64_t far;                         /* the last number too far ahead to be admitted; 0: none */
    uint64_t seen[CL_REPLAY_WINDOW / 64]; /* a ring of bits, for [next - CL_REPLAY_WINDOW, next) */
};

/* Whether the number has been seen, or is below the window. */
bool cl_replay_seen(const struct cl_replay *replay, uint64_t number);
/* True when the number is new; from then on it has been seen. */
bool cl_replay_admit(struct cl_replay *replay, uint64_t number);
/* Whether a number that nobody vouches for is not too far ahead. */
bool cl_replay_near(struct cl_replay *replay, uint64_t number);
