/* Kernels of every level: the same bits whatever the float mode of their thread, which stays as it was. */
#include "kernels/float_mode.h"

#include <stdbool.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/level.h"
#include "tests/check.h"

enum { BYTES = 4096, ROUNDS_UP = 2 << 13 /* of MXCSR */ };

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};

/* Everything that a level computes from the same numbers, one result after another. */
struct results {
    uint8_t bytes[256 * BYTES];
    size_t used;
};

static struct results ieee, other;

static uint8_t *next_result(struct results *results, const void *source, size_t length)
{
    uint8_t *at = results->bytes + results->used;
    memset(at, 0, BYTES);
    memcpy(at, source, length);
    results->used += BYTES;
    return at;
}

/* Subnormal and small numbers of any type, from the low bits of a counter generator; exponents stay below infinity. */
static void fill(uint8_t *bytes, uint64_t seed)
{
    for (size_t i = 0; i < BYTES; i += 2) {
        uint64_t random = (seed + i) * 0x9E3779B97F4A7C15u;
        random = (random ^ random >> 29) * 0xBF58476D1CE4E5B9u;
        bytes[i] = (uint8_t)(random >> 40);
        bytes[i + 1] = (uint8_t)(random >> 48 & (random >> 60 < 6 ? 0x80 : 0x8f));
    }
}

static void reduce_and_scale(struct results *results, const struct cl_level *level, const uint8_t *a, const uint8_t *b)
{
    for (size_t dtype = 0; dtype < CL_DTYPES; dtype++) {
        size_t count = BYTES / 8; /* of the widest type */
        for (size_t op = 0; op < CL_OPS; op++)
            if (level->reduce[dtype][op] != NULL)
                level->reduce[dtype][op](next_result(results, a, BYTES), b, count);
        level->scale[dtype](next_result(results, a, BYTES), count, 3);
    }
}

static void encode_and_decode(struct results *results, const struct cl_level *level, const uint8_t *a, const uint8_t *b)
{
    struct cl_codec_place place = {7, 0};
    size_t count = BYTES / sizeof(float);
    for (int kind = 0; kind < CL_CODECS; kind++) {
        const struct cl_codec *codec = &level->codecs[kind];
        uint8_t *encoded = next_result(results, a, 0);
        codec->encode(encoded, (const float *)(const void *)a, count - 1, place);
        codec->decode((float *)(void *)next_result(results, a, 0), encoded, count - 1, place);
        codec->decode_add((float *)(void *)next_result(results, b, BYTES), encoded, count - 1, place);
    }
    cl_codec_keep_error((float *)(void *)next_result(results, a, 0), (const float *)(const void *)a,
                        (const float *)(const void *)b, count, 3);
}

static void compute(struct results *results, const struct cl_level *level)
{
    static uint8_t a[BYTES] __attribute__((aligned(8))), b[BYTES] __attribute__((aligned(8)));
    results->used = 0;
    fill(a, 1);
    fill(b, 2);
    reduce_and_scale(results, level, a, b);
    encode_and_decode(results, level, a, b);
}

static void compare_in(cl_float_mode mode)
{
    cl_float_mode own = cl_float_mode_read();
    for (size_t i = 0; i < sizeof LEVELS / sizeof *LEVELS; i++) {
        if (cl_kernels_select(LEVELS[i]) != CL_OK)
            continue;
        compute(&ieee, cl_level_current());
        cl_float_mode_write(mode);
        compute(&other, cl_level_current());
        cl_float_mode after = cl_float_mode_read();
        cl_float_mode_write(own);
        CHECK_EQ(after & ~(cl_float_mode)CL_FLOAT_MODE_STICKY, mode);
        CHECK_EQ(other.used, ieee.used);
        for (size_t at = 0; at < ieee.used; at += BYTES)
            if (memcmp(ieee.bytes + at, other.bytes + at, BYTES) != 0) {
                fprintf(stderr, "%s: result %zu differs in mode %llx\n", LEVELS[i], at / BYTES,
                        (unsigned long long)mode);
                CHECK(false);
            }
    }
}

TEST(test_subnormals_are_kept_in_threads_that_flush_them)
{
    compare_in(CL_FLOAT_MODE_IEEE | CL_FLOAT_MODE_FLUSHES | CL_FLOAT_MODE_FLUSHES_OPERANDS);
}

#if defined(__x86_64__)
TEST(test_results_are_rounded_to_nearest_in_threads_that_round_up)
{
    compare_in(CL_FLOAT_MODE_IEEE | ROUNDS_UP);
}

TEST(test_nothing_traps_in_threads_that_trap)
{
    compare_in(0); /* no exception is masked: an inexact result would end this process */
}
#endif

TEST(test_the_data_of_these_tests_has_subnormals)
{
    compute(&ieee, &cl_level_scalar);
    uint32_t bits;
    size_t subnormals = 0;
    for (size_t at = 0; at < BYTES; at += sizeof bits) {
        memcpy(&bits, ieee.bytes + at, sizeof bits);
        subnormals += (bits & 0x7f800000) == 0 && (bits & 0x7fffff) != 0;
    }
    CHECK(subnormals > 20);
}
