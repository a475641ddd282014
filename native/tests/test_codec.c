/*
 * Codecs, on every instruction-set level: error bounds, blocks that stand alone, values that are not finite, and the
 * same bits everywhere.
 */
#include "kernels/codec.h"
#include "kernels/level.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check.h"

enum { VALUES = 4096, GUARD = 64 };

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};
static const size_t COUNTS[] = {0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 1000, VALUES};

/* A test that runs on every level of this machine. */
#define EACH_LEVEL(name)                                                                                               \
    static void name##_on_level(void);                                                                                 \
    TEST(name)                                                                                                         \
    {                                                                                                                  \
        for (size_t level = 0; level < sizeof LEVELS / sizeof *LEVELS; level++)                                        \
            if (cl_kernels_select(LEVELS[level]) == CL_OK)                                                             \
                name##_on_level();                                                                                     \
    }                                                                                                                  \
    static void name##_on_level(void)

enum data { GAUSSIAN, HEAVY_TAIL, DENORMAL, HUGE_MAGNITUDES, ONE_OUTLIER, ZEROS, DATA };

static float values[VALUES], decoded[VALUES + GUARD];
static uint8_t encoded[2 * VALUES + GUARD];

static double uniform(void)
{
    return (double)random() / 2147483648.0;
}

static double gaussian(void)
{
    return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform());
}

static float draw(enum data data, size_t i)
{
    switch (data) {
    case GAUSSIAN:
        return (float)gaussian();
    case HEAVY_TAIL:
        return (float)(gaussian() * exp(2 * gaussian()));
    case DENORMAL:
        return (float)ldexp(gaussian(), -135);
    case HUGE_MAGNITUDES:
        return (float)(ldexp(uniform() - 0.5, 121));
    case ONE_OUTLIER:
        return i % 256 == 77 ? 1000.0f : (float)gaussian() * 1e-3f;
    default:
        return 0;
    }
}

static void fill(enum data data)
{
    srandom(42 + (unsigned)data);
    for (size_t i = 0; i < VALUES; i++)
        values[i] = draw(data, i);
}

static const struct cl_codec_place PLACE = {.key = 0x1234567, .block = 3};

TEST(test_all_levels_give_the_same_bits)
{
    static uint8_t first_encoded[sizeof encoded];
    static float first_decoded[2][VALUES + GUARD];
    for (int kind = 0; kind < CL_CODECS; kind++)
        for (int data = 0; data < DATA; data++)
            for (size_t n = 0; n < sizeof COUNTS / sizeof *COUNTS; n++) {
                fill((enum data)data);
                for (size_t level = 0; level < 3; level++) {
                    if (cl_kernels_select(LEVELS[level]) != CL_OK)
                        continue;
                    const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
                    size_t count = COUNTS[n], bytes = cl_codec_bytes(codec, count);
                    memset(encoded, 0xee, sizeof encoded);
                    memset(decoded, 0xee, sizeof decoded);
                    codec->encode(encoded, values, count, PLACE);
                    CHECK(encoded[bytes] == 0xee && encoded[bytes + GUARD - 1] == 0xee);
                    codec->decode(decoded, encoded, count, PLACE);
                    CHECK(((uint8_t *)(decoded + count))[0] == 0xee);
                    static float sums[VALUES + GUARD];
                    memcpy(sums, decoded, sizeof sums);
                    codec->decode_add(sums, encoded, count, PLACE);
                    if (level == 0) {
                        memcpy(first_encoded, encoded, sizeof encoded);
                        memcpy(first_decoded[0], decoded, sizeof decoded);
                        memcpy(first_decoded[1], sums, sizeof sums);
                    } else {
                        CHECK(memcmp(first_encoded, encoded, bytes) == 0);
                        CHECK(memcmp(first_decoded[0], decoded, count * sizeof *decoded) == 0);
                        CHECK(memcmp(first_decoded[1], sums, count * sizeof *sums) == 0);
                    }
                    for (size_t i = 0; i < count; i++)
                        CHECK(sums[i] == decoded[i] + decoded[i] || isinf(decoded[i]));
                }
            }
}

EACH_LEVEL(test_16_bit_values_are_the_nearest)
{
    for (int data = 0; data < DATA; data++) {
        fill((enum data)data);
        const struct cl_codec *f16 = cl_codec_of(CL_CODEC_F16), *bf16 = cl_codec_of(CL_CODEC_BF16);
        f16->encode(encoded, values, VALUES, PLACE);
        f16->decode(decoded, encoded, VALUES, PLACE);
        for (size_t i = 0; i < VALUES; i++)
            if (fabsf(values[i]) < 65520)
                CHECK(fabsf(decoded[i] - values[i]) <= fmaxf(ldexpf(fabsf(values[i]), -11), ldexpf(1, -25)));
            else
                CHECK(isinf(decoded[i]));
        bf16->encode(encoded, values, VALUES, PLACE);
        bf16->decode(decoded, encoded, VALUES, PLACE);
        for (size_t i = 0; i < VALUES; i++)
            CHECK(fabsf(decoded[i] - values[i]) <= fmaxf(ldexpf(fabsf(values[i]), -8), ldexpf(1, -134)));
    }
}

EACH_LEVEL(test_int8_is_within_half_a_step)
{
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_INT8);
    for (int data = 0; data < DATA; data++) {
        fill((enum data)data);
        codec->encode(encoded, values, VALUES, PLACE);
        codec->decode(decoded, encoded, VALUES, PLACE);
        for (size_t i = 0; i < VALUES; i++) {
            float largest = 0;
            for (size_t j = i / 64 * 64; j < i / 64 * 64 + 64; j++)
                largest = fmaxf(largest, fabsf(values[j]));
            float step = largest / 127 * (1 + 1.0f / 128);
            CHECK(fabsf(decoded[i] - values[i]) <= (largest < ldexpf(1, -100) ? largest : step * 0.5001f));
        }
    }
}

/* Squared error over squared magnitude. */
static double error_of(const struct cl_codec *codec)
{
    double error = 0, magnitude = 0;
    codec->encode(encoded, values, VALUES, PLACE);
    codec->decode(decoded, encoded, VALUES, PLACE);
    for (size_t i = 0; i < VALUES; i++) {
        error += pow((double)decoded[i] - (double)values[i], 2);
        magnitude += pow((double)values[i], 2);
    }
    return error / magnitude;
}

EACH_LEVEL(test_mean_squared_errors)
{
    const struct cl_codec *int8 = cl_codec_of(CL_CODEC_INT8), *int4 = cl_codec_of(CL_CODEC_INT4);
    fill(GAUSSIAN);
    CHECK(error_of(int8) < 4.5e-5 && error_of(int8) > 2e-5);
    CHECK(error_of(int4) < 0.0135 && error_of(int4) > 0.008);
    fill(HEAVY_TAIL); /* without the rotation it is 0.07 */
    CHECK(error_of(int4) < 0.0135);
    fill(ONE_OUTLIER);
    CHECK(error_of(int4) < 0.0135);
    fill(HUGE_MAGNITUDES);
    CHECK(error_of(int4) < 0.0135);
    fill(GAUSSIAN); /* 1 - 2 / pi is 0.363 */
    CHECK(fabs(error_of(cl_codec_of(CL_CODEC_SIGN)) - 0.36) < 0.02);
}

/* The mean magnitude of up to 128 values. */
static double mean_magnitude(const float *block, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)fabsf(block[i]);
    return sum / (double)count;
}

EACH_LEVEL(test_sign_keeps_signs_and_mean_magnitudes)
{
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_SIGN);
    for (int data = 0; data < DATA; data++)
        for (size_t count = 1; count <= 300; count += 13) {
            fill((enum data)data);
            codec->encode(encoded, values, count, PLACE);
            codec->decode(decoded, encoded, count, PLACE);
            for (size_t i = 0; i < count; i++) {
                size_t start = i / 128 * 128;
                double mean = mean_magnitude(values + start, count - start < 128 ? count - start : 128);
                double expected = mean < ldexp(1, -100) ? 0 : copysign(mean, (double)values[i]);
                CHECK(fabs((double)decoded[i] - expected) <= fabs(expected) * (1.0 / 256 + 1e-6));
            }
        }
}

EACH_LEVEL(test_sign_of_zeros_and_of_the_largest_values)
{
    static const float ENDS[] = {0.0f, -0.0f, 2.0f, -2.0f};
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_SIGN);
    codec->encode(encoded, ENDS, 4, PLACE);
    codec->decode(decoded, encoded, 4, PLACE);
    CHECK(decoded[0] == 1 && decoded[1] == 1 && decoded[2] == 1 && decoded[3] == -1);
    for (size_t count = 1; count <= 128; count++) {
        for (size_t i = 0; i < count; i++)
            values[i] = -FLT_MAX;
        codec->encode(encoded, values, count, PLACE);
        codec->decode(decoded, encoded, count, PLACE);
        CHECK(decoded[count - 1] < -FLT_MAX * 0.99f && !isinf(decoded[count - 1]));
    }
    for (size_t i = 0; i < 128; i++)
        values[i] = -FLT_MIN; /* far below the smallest scale: zeros, and as bits */
    codec->encode(encoded, values, 128, PLACE);
    for (size_t i = 0; i < codec->block_bytes; i++)
        CHECK_EQ(encoded[i], 0);
}

EACH_LEVEL(test_errors_of_values_are_uncorrelated)
{
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_INT4);
    double products = 0, squares = 0, sum = 0;
    fill(GAUSSIAN);
    codec->encode(encoded, values, VALUES, PLACE);
    codec->decode(decoded, encoded, VALUES, PLACE);
    for (size_t i = 0; i + 1 < VALUES; i++) {
        double error = (double)decoded[i] - (double)values[i], next = (double)decoded[i + 1] - (double)values[i + 1];
        products += error * next;
        squares += error * error;
        sum += error;
    }
    CHECK(fabs(products / squares) < 4 / sqrt(VALUES)); /* four standard deviations */
    CHECK(fabs(sum) < 4 * sqrt(squares));
}

EACH_LEVEL(test_blocks_stand_alone)
{
    static uint8_t part[sizeof encoded];
    for (int kind = 0; kind < CL_CODECS; kind++) {
        const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
        fill(HEAVY_TAIL);
        codec->encode(encoded, values, VALUES, PLACE);
        for (size_t block = 1; block < 16; block += 7) {
            struct cl_codec_place place = {PLACE.key, PLACE.block + block};
            size_t count = VALUES - block * codec->block_values;
            codec->encode(part, values + block * codec->block_values, count, place);
            CHECK(memcmp(part, encoded + block * codec->block_bytes, cl_codec_bytes(codec, count)) == 0);
        }
    }
}

EACH_LEVEL(test_rotations_of_other_keys_and_blocks_differ)
{
    static uint8_t other[sizeof encoded];
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_INT4);
    fill(GAUSSIAN);
    codec->encode(encoded, values, 256, PLACE);
    codec->encode(other, values, 256, (struct cl_codec_place){PLACE.key + 1, PLACE.block});
    CHECK(memcmp(encoded, other, codec->block_bytes) != 0);
    codec->encode(other, values, 256, (struct cl_codec_place){PLACE.key, PLACE.block + 1});
    CHECK(memcmp(encoded, other, codec->block_bytes) != 0);
}

EACH_LEVEL(test_values_that_are_not_finite_spoil_their_block_only)
{
    static const float BAD[] = {INFINITY, -INFINITY, NAN};
    for (int kind = CL_CODEC_INT8; kind < CL_CODECS; kind++)
        for (size_t bad = 0; bad < 3; bad++) {
            const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
            fill(GAUSSIAN);
            values[codec->block_values + 5] = BAD[bad];
            codec->encode(encoded, values, VALUES, PLACE);
            codec->decode(decoded, encoded, VALUES, PLACE);
            for (size_t i = 0; i < VALUES; i++)
                CHECK((i / codec->block_values == 1) == (isnan(decoded[i]) != 0));
        }
    for (int kind = CL_CODEC_F16; kind < CL_CODEC_INT8; kind++) {
        const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
        codec->encode(encoded, BAD, 3, PLACE);
        codec->decode(decoded, encoded, 3, PLACE);
        CHECK(decoded[0] == INFINITY && decoded[1] == -INFINITY && isnan(decoded[2]));
    }
}

EACH_LEVEL(test_the_largest_finite_values_stay_finite)
{
    for (int kind = CL_CODEC_INT8; kind < CL_CODECS; kind++)
        for (int seed = 0; seed < 100; seed++) {
            const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
            srandom((unsigned)seed);
            double signs = seed % 3 * 0.5, spread = seed % 2 * uniform(); /* of one sign, some and all of the other */
            for (size_t i = 0; i < VALUES; i++)
                values[i] = (float)(FLT_MAX * (1 - spread * uniform())) * (uniform() < signs ? -1.0f : 1.0f);
            codec->encode(encoded, values, VALUES, PLACE);
            codec->decode(decoded, encoded, VALUES, PLACE);
            double error = 0, magnitude = 0;
            int are_finite = 1;
            for (size_t i = 0; i < VALUES; i++) {
                are_finite = are_finite && isfinite(decoded[i]);
                error += pow((double)decoded[i] - (double)values[i], 2);
                magnitude += pow((double)values[i], 2);
            }
            CHECK(are_finite && error < 0.4 * magnitude && (kind != CL_CODEC_INT4 || error < 0.03 * magnitude));
        }
}

EACH_LEVEL(test_zeros_stay_zeros)
{
    fill(ZEROS);
    for (int kind = 0; kind < CL_CODECS; kind++) {
        const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
        codec->encode(encoded, values, VALUES, PLACE);
        codec->decode(decoded, encoded, VALUES, PLACE);
        for (size_t i = 0; i < VALUES; i++)
            CHECK(decoded[i] == 0);
    }
}

TEST(test_unknown_codec)
{
    CHECK(cl_codec_of(CL_CODECS) == NULL);
}

TEST(test_codecs_by_number)
{
    fill(GAUSSIAN);
    for (int kind = 0; kind < CL_CODECS; kind++) {
        const struct cl_codec *codec = cl_codec_of((enum cl_codec_kind)kind);
        static uint8_t expected[sizeof encoded];
        codec->encode(expected, values, VALUES, PLACE);
        CHECK(cl_encode((uint32_t)kind + 1, encoded, values, VALUES, PLACE.key, PLACE.block) == CL_OK);
        CHECK(memcmp(encoded, expected, cl_codec_bytes(codec, VALUES)) == 0);
        CHECK(cl_decode((uint32_t)kind + 1, decoded, encoded, VALUES, PLACE.key, PLACE.block, 0) == CL_OK);
        float once = decoded[VALUES - 1];
        CHECK(cl_decode((uint32_t)kind + 1, decoded, encoded, VALUES, PLACE.key, PLACE.block, 1) == CL_OK);
        CHECK(decoded[VALUES - 1] == 2 * once && once != 0);
    }
    CHECK(cl_encode(0, encoded, values, 1, 0, 0) == CL_EINVAL);
    CHECK(cl_encode(CL_CODECS + 1, encoded, values, 1, 0, 0) == CL_EINVAL);
    CHECK(cl_decode(0, decoded, encoded, 1, 0, 0, 0) == CL_EINVAL);
    CHECK(cl_decode(CL_CODECS + 1, decoded, encoded, 1, 0, 0, 0) == CL_EINVAL);
    CHECK(cl_codec_key(5, 0) == 5 && cl_codec_key(5, 1) != cl_codec_key(5, 2));
}
