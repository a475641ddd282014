#include "kernels/nh.h"

#include "kernels/level.h"

void cl_nh(uint64_t sums[2], const uint8_t *block, size_t length, const struct cl_nh_key *key)
{
    const struct cl_level *level = cl_level_current();
    size_t whole = length - length % CL_NH_CHUNK_BYTES;
    sums[0] = sums[1] = 0;
    level->nh(sums, block, whole, key->words[0], key->words[1]);
    if (whole == length)
        return;
    uint8_t last[CL_NH_CHUNK_BYTES] = {0};
    memcpy(last, block + whole, length - whole);
    level->nh(sums, last, sizeof last, key->words[0] + whole / 4, key->words[1] + whole / 4);
}
