/* Sums of large arrays, on every instruction-set level. */
#include "commlayer.h"

#include <stdlib.h>
#include <string.h>

#include "tests/check.h"

enum { LENGTH = 3 * CL_SUMS_CHUNK_BYTES + 1001, CHUNKS = 4 };

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};

static uint8_t base[LENGTH];

static uint64_t draw(void)
{
    return (uint64_t)random() << 42 ^ (uint64_t)random() << 21 ^ (uint64_t)random();
}

TEST(test_sums_tell_arrays_apart)
{
    static uint32_t key[CL_SUMS_KEY_WORDS];
    uint64_t sums[CHUNKS][2], others[CHUNKS][2];
    srandom(23);
    for (size_t i = 0; i < CL_SUMS_KEY_WORDS; i++)
        key[i] = (uint32_t)draw();
    for (size_t i = 0; i < LENGTH; i++)
        base[i] = (uint8_t)random();
    cl_sums(base, LENGTH, key, *sums);
    for (size_t level = 0; level < sizeof LEVELS / sizeof *LEVELS; level++) {
        if (cl_kernels_select(LEVELS[level]) != CL_OK)
            continue;
        cl_sums(base, LENGTH, key, *others);
        CHECK(memcmp(sums, others, sizeof sums) == 0);
    }
    for (int round = 0; round < 2000; round++) {
        size_t at = round == 0 ? LENGTH - 1 : (size_t)draw() % LENGTH, chunk = at / CL_SUMS_CHUNK_BYTES;
        uint8_t bit = (uint8_t)(1u << random() % 8);
        base[at] ^= bit;
        cl_sums(base + chunk * CL_SUMS_CHUNK_BYTES,
                chunk == CHUNKS - 1 ? LENGTH % CL_SUMS_CHUNK_BYTES : CL_SUMS_CHUNK_BYTES, key, others[0]);
        CHECK(sums[chunk][0] != others[0][0] && sums[chunk][1] != others[0][1]);
        base[at] ^= bit;
    }
}
