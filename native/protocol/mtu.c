#include "protocol/mtu.h"

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

void cl_mtu_init(struct cl_mtu *mtu, uint32_t full)
{
    *mtu = (struct cl_mtu){.full = full,
                           .least = larger(CL_MTU_LEAST, full / (CL_MTU_FRAGMENTS_MAX - 2) + CL_MTU_LEAST / 8),
                           .limit = full,
                           .next_us = UINT64_MAX};
}

static void forget_rounds(struct cl_mtu *mtu)
{
    mtu->lost_us = 0;
    mtu->lost_bytes = mtu->rounds = 0;
}

void cl_mtu_on_came(struct cl_mtu *mtu, uint64_t sent_us, uint32_t bytes)
{
    if (bytes > mtu->limit) {
        mtu->limit = bytes;
        mtu->beyond = mtu->beyond > bytes ? mtu->beyond : mtu->full + 1;
        mtu->probe = 0;
        mtu->next_us = bytes < mtu->full ? 0 : UINT64_MAX;
    }
    if (bytes >= mtu->lost_bytes)
        forget_rounds(mtu);
    if (mtu->suspect && bytes >= mtu->suspect) {
        mtu->suspect = mtu->probe = 0;
        mtu->next_us = mtu->limit < mtu->full ? 0 : UINT64_MAX;
    }
    if (sent_us >= mtu->came_us) {
        mtu->came_us = sent_us;
        mtu->came_bytes = bytes;
    }
}

void cl_mtu_on_lost(struct cl_mtu *mtu, uint64_t sent_us, uint32_t bytes)
{
    if (bytes > mtu->limit || bytes <= mtu->least || sent_us < mtu->round_us)
        return;
    mtu->lost_us = sent_us > mtu->lost_us ? sent_us : mtu->lost_us;
    mtu->lost_bytes = larger(mtu->lost_bytes, bytes);
}

void cl_mtu_judge(struct cl_mtu *mtu, uint64_t now_us)
{
    if (mtu->suspect || !mtu->lost_us || mtu->came_us <= mtu->lost_us)
        return;
    if (mtu->came_bytes >= mtu->lost_bytes) {
        forget_rounds(mtu);
        return;
    }
    mtu->lost_us = 0;
    mtu->round_us = now_us;
    if (++mtu->rounds < CL_MTU_ROUNDS)
        return;
    mtu->suspect = mtu->probe = mtu->lost_bytes;
    mtu->tries = 0;
    mtu->next_us = now_us;
    forget_rounds(mtu);
}

static void fall(struct cl_mtu *mtu)
{
    mtu->limit = larger(mtu->suspect > CL_MTU_BASE ? CL_MTU_BASE : mtu->suspect / 2, mtu->least);
    mtu->beyond = mtu->suspect;
    mtu->begins = true;
    mtu->suspect = 0;
    forget_rounds(mtu);
}

/* The size to try next; 0: the search has ended. */
static uint32_t choose(struct cl_mtu *mtu)
{
    if (mtu->begins) {
        mtu->begins = false;
        return mtu->full;
    }
    if (mtu->beyond <= mtu->limit + CL_MTU_STEP)
        return 0;
    return (mtu->limit + mtu->beyond) / 2;
}

uint32_t cl_mtu_probe(struct cl_mtu *mtu, uint64_t wait_us, uint64_t now_us)
{
    if (mtu->probe && mtu->tries == CL_MTU_TRIES) {
        if (mtu->suspect)
            fall(mtu);
        mtu->beyond = mtu->probe < mtu->beyond ? mtu->probe : mtu->beyond;
        mtu->probe = 0;
    }
    if (!mtu->probe) {
        mtu->tries = 0;
        mtu->probe = choose(mtu);
    }
    if (!mtu->probe) {
        mtu->begins = true;
        mtu->beyond = mtu->full + 1;
        mtu->next_us = now_us + CL_MTU_AGAIN_US;
        return 0;
    }
    mtu->tries++;
    mtu->next_us = now_us + (wait_us > CL_MTU_TRY_US ? wait_us : CL_MTU_TRY_US);
    return mtu->probe;
}

void cl_mtu_postpone(struct cl_mtu *mtu, uint64_t next_us)
{
    mtu->next_us = next_us;
}

void cl_mtu_resume(struct cl_mtu *mtu, uint64_t now_us)
{
    if ((mtu->suspect || mtu->limit < mtu->full) && mtu->next_us == UINT64_MAX)
        mtu->next_us = now_us;
}
