/* NH on every level, beside its definition; and that different blocks have different sums. */
#include "kernels/nh.h"

#include <string.h>

#include "commlayer.h"
#include "tests/check.h"

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};

static struct cl_nh_key key;
static uint8_t block[CL_NH_BLOCK_BYTES + 1];

static uint64_t draw(uint64_t *state)
{
    *state += 0x9E3779B97F4A7C15u;
    uint64_t x = (*state ^ *state >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static void fill(uint64_t seed)
{
    for (size_t i = 0; i < 2 * CL_NH_BLOCK_WORDS; i++)
        key.words[i / CL_NH_BLOCK_WORDS][i % CL_NH_BLOCK_WORDS] = (uint32_t)draw(&seed);
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = (uint8_t)draw(&seed);
}

/* The definition, a byte at a time. */
static uint64_t sum_of(const uint8_t *bytes, size_t length, const uint32_t *words)
{
    uint64_t sum = 0;
    size_t padded = (length + CL_NH_CHUNK_BYTES - 1) / CL_NH_CHUNK_BYTES * CL_NH_CHUNK_BYTES;
    for (size_t i = 0; i < padded / 4; i += 2) {
        uint64_t pair[2];
        for (size_t j = 0; j < 2; j++) {
            uint64_t word = 0;
            for (size_t b = 0; b < 4; b++)
                if (4 * (i + j) + b < length)
                    word |= (uint64_t)bytes[4 * (i + j) + b] << 8 * b;
            pair[j] = (word + words[i + j]) % (1ull << 32);
        }
        sum += pair[0] * pair[1];
    }
    return sum;
}

TEST(test_every_level_follows_the_definition)
{
    for (size_t level = 0; level < sizeof LEVELS / sizeof *LEVELS; level++) {
        if (cl_kernels_select(LEVELS[level]) != CL_OK)
            continue;
        for (size_t length = 0; length <= CL_NH_BLOCK_BYTES; length += length < 200 ? 1 : 59) {
            fill(length);
            for (size_t offset = 0; offset < 2; offset++) { /* payloads begin at odd addresses */
                uint64_t sums[2];
                cl_nh(sums, block + offset, length - (length == CL_NH_BLOCK_BYTES && offset), &key);
                size_t used = length - (length == CL_NH_BLOCK_BYTES && offset);
                CHECK(sums[0] == sum_of(block + offset, used, key.words[0]));
                CHECK(sums[1] == sum_of(block + offset, used, key.words[1]));
            }
        }
    }
}

TEST(test_a_change_anywhere_changes_both_sums)
{
    fill(1);
    uint64_t before[2], after[2];
    cl_nh(before, block, CL_NH_BLOCK_BYTES, &key);
    size_t same = 0;
    for (size_t bit = 0; bit < 8 * CL_NH_BLOCK_BYTES; bit++) {
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
        cl_nh(after, block, CL_NH_BLOCK_BYTES, &key);
        same += after[0] == before[0];
        same += after[1] == before[1];
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK_EQ(same, 0);
}
