/* Sums of large arrays, in two steps of NH: of blocks, then of the sums of a chunk's blocks. */
#include "commlayer.h"
#include "kernels/nh.h"

#include <string.h>

enum { BLOCKS = CL_SUMS_CHUNK_BYTES / CL_NH_BLOCK_BYTES };

_Static_assert(BLOCKS * 2 * sizeof(uint64_t) <= CL_NH_BLOCK_BYTES, "the sums of a chunk are one block");
_Static_assert(CL_SUMS_KEY_WORDS == 2 * CL_NH_BLOCK_WORDS, "the key is one of NH");

void cl_sums(const void *memory, uint64_t length, const uint32_t *key, uint64_t *sums)
{
    struct cl_nh_key words;
    memcpy(&words, key, sizeof words);
    for (uint64_t chunk = 0; chunk < length; chunk += CL_SUMS_CHUNK_BYTES, sums += 2) {
        uint64_t blocks[BLOCKS][2] = {{0}};
        for (uint64_t i = 0, at = chunk; i < BLOCKS && at < length; i++, at += CL_NH_BLOCK_BYTES) {
            uint64_t left = length - at;
            cl_nh(blocks[i], (const uint8_t *)memory + at, left < CL_NH_BLOCK_BYTES ? left : CL_NH_BLOCK_BYTES, &words);
        }
        cl_nh(sums, (const uint8_t *)blocks, sizeof blocks, &words);
    }
}
