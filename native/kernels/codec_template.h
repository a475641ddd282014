/*
 * All codecs of one level, included once by each codec_<level>.c: plain loops over blocks of fixed length, which the
 * compiler vectorises for the instructions named by TARGET. The level defines TARGET, F16_LANES, floats, f16_load and
 * f16_store as for reduce_template.h.
 *
 * Levels give the same bits because no sum depends on the width of vectors, and the build forbids contraction
 * (-ffp-contract=off). The product of a quantized value and its bf16 scale is exact in f32.
 */
#include "kernels/float_mode.h"

#include <float.h>

#define INT8_VALUES 64
#define INT4_VALUES 256
#define SIGN_VALUES 128
#define SCALE_BYTES 2
#define NOT_FINITE_BITS 0x7f800000u /* of a magnitude: infinity and, above, NaN */
#define ZERO_BITS (27u << 23)       /* 2^-100: smaller magnitudes would make scales denormal */
#define LARGEST_BITS 0x7f7f0000u    /* of a finite bf16 */
#define NAN_HALF 0x7fc0u
#define SIGN_BIT 0x80000000u
#define ROUNDER                                                                                                        \
    12582912.0f /* 1.5 x 2^23: added to a small number, the sum ends in its nearest integer (ties to even) */
#define ROUNDER_BITS 0x4b400000u

typedef float vector __attribute__((vector_size(64)));
typedef uint32_t vector_bits __attribute__((vector_size(64)));
#define LANES 16

/* Largest magnitude of the block, as bits: these order as the magnitudes do, with infinity and NaN at the end. */
TARGET static inline uint32_t largest_bits(const float *values, size_t count)
{
    int32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)(bits_of(values[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return (uint32_t)largest;
}

/* The scale as the upper half of an f32, rounded up, so that no value exceeds `steps` times the scale; 0 for magnitudes
 * below `zero_bits`. */
TARGET static inline uint16_t scale_of(uint32_t largest, float steps, uint32_t zero_bits)
{
    if (largest >= NOT_FINITE_BITS)
        return NAN_HALF;
    if (largest < zero_bits)
        return 0;
    return (uint16_t)((bits_of(float_of(largest) / steps) + 0xffff) >> 16);
}

TARGET static inline float bf16_value(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* Nearest even; carries into infinity. */
TARGET static inline uint16_t bf16_nearest(uint32_t bits)
{
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

TARGET static inline void put_half(uint8_t *target, uint16_t half)
{
    memcpy(target, &half, SCALE_BYTES);
}

TARGET static inline uint16_t get_half(const uint8_t *source)
{
    uint16_t half;
    memcpy(&half, source, SCALE_BYTES);
    return half;
}

/* ---- f16, bf16: blocks of one value ---- */

TARGET static void f16_encode(uint8_t *target, const float *source, size_t count, struct cl_codec_place place)
{
    CL_IEEE_ARITHMETIC;
    (void)place;
    floats value;
    size_t whole = count - count % F16_LANES, rest = count - whole;
    for (size_t i = 0; i < whole; i += F16_LANES) {
        memcpy(&value, source + i, sizeof value);
        f16_store(target + 2 * i, value);
    }
    if (rest > 0) {
        float last[F16_LANES] = {0};
        uint16_t encoded[F16_LANES];
        memcpy(last, source + whole, rest * sizeof *last);
        memcpy(&value, last, sizeof value);
        f16_store(encoded, value);
        memcpy(target + 2 * whole, encoded, rest * sizeof *encoded);
    }
}

/* The decoded values, or with `sum` those added to it. */
TARGET static inline void f16_unpack(float *target, const uint8_t *source, size_t count, const float *sum)
{
    size_t whole = count - count % F16_LANES, rest = count - whole;
    floats value, before;
    for (size_t i = 0; i < whole; i += F16_LANES) {
        value = f16_load(source + 2 * i);
        if (sum != NULL) {
            memcpy(&before, sum + i, sizeof before);
            value = before + value;
        }
        memcpy(target + i, &value, sizeof value);
    }
    if (rest > 0) {
        uint16_t encoded[F16_LANES] = {0};
        float last[F16_LANES];
        memcpy(encoded, source + 2 * whole, rest * sizeof *encoded);
        value = f16_load(encoded);
        memcpy(last, &value, sizeof last);
        for (size_t i = 0; i < rest; i++)
            target[whole + i] = sum == NULL ? last[i] : sum[whole + i] + last[i];
    }
}

TARGET static void f16_decode(float *target, const uint8_t *source, size_t count, struct cl_codec_place place)
{
    CL_IEEE_ARITHMETIC;
    (void)place;
    f16_unpack(target, source, count, NULL);
}

TARGET static void f16_decode_add(float *target, const uint8_t *source, size_t count, struct cl_codec_place place)
{
    CL_IEEE_ARITHMETIC;
    (void)place;
    f16_unpack(target, source, count, target);
}

/* NaN stays NaN. */
TARGET static void bf16_encode(uint8_t *target, const float *source, size_t count, struct cl_codec_place place)
{
    CL_IEEE_ARITHMETIC;
    (void)place;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(source[i]), is_nan = (bits & 0x7fffffffu) > NOT_FINITE_BITS;
        put_half(target + 2 * i, is_nan ? NAN_HALF : bf16_nearest(bits));
    }
}

TARGET static void bf16_decode(float *target, const uint8_t *source, size_t count, struct cl_codec_place place)
{
    (void)place;
    for (size_t i = 0; i < count; i++)
        target[i] = bf16_value(get_half(source + 2 * i));
}

TARGET static void bf16_decode_add(float *target, const uint8_t *source, size_t count, struct cl_codec_place place)
{
    CL_IEEE_ARITHMETIC;
    (void)place;
    for (size_t i = 0; i < count; i++)
        target[i] += bf16_value(get_half(source + 2 * i));
}

/* ---- int8 ---- */

TARGET static inline void int8_encode_block(uint8_t *target, const float *source, size_t count, uint64_t key,
                                            uint64_t block)
{
    (void)count, (void)key, (void)block;
    uint16_t scale = scale_of(largest_bits(source, INT8_VALUES), 127, ZERO_BITS);
    put_half(target, scale);
    if (scale == 0 || scale == NAN_HALF) {
        memset(target + SCALE_BYTES, 0, INT8_VALUES);
        return;
    }
    float factor = 1 / bf16_value(scale);
    for (size_t i = 0; i < INT8_VALUES; i++)
        target[SCALE_BYTES + i] = (uint8_t)(bits_of(source[i] * factor + ROUNDER) - ROUNDER_BITS);
}

TARGET static inline void int8_decode_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    (void)key, (void)block;
    float scale = bf16_value(get_half(source));
    const int8_t *quantized = (const int8_t *)source + SCALE_BYTES;
    for (size_t i = 0; i < INT8_VALUES; i++)
        target[i] = (float)quantized[i] * scale;
}

TARGET static inline void int8_add_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    (void)key, (void)block;
    float scale = bf16_value(get_half(source));
    const int8_t *quantized = (const int8_t *)source + SCALE_BYTES;
    for (size_t i = 0; i < INT8_VALUES; i++)
        target[i] += (float)quantized[i] * scale;
}

/* ---- int4, rotated ---- */

/* 64 random bits: SplitMix64 (Steele et al., OOPSLA 2014) at a position of its sequence. */
TARGET static inline uint64_t random_bits(uint64_t key, uint64_t counter)
{
    uint64_t x = key + counter * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* A block of 256 values as 16 vectors; value 16 i + j is lane j of vector i. */
#define VECTORS 16
#define EACH_VECTOR _Pragma("GCC unroll 16") for (size_t i = 0; i < VECTORS; i++)

/* Random signs of a block, lane j of vector i: bit i of word j. */
TARGET static inline void draw_signs(vector_bits *signs, uint64_t key, uint64_t block)
{
    for (uint64_t pair = 0; pair < LANES / 2; pair++) {
        uint64_t random = random_bits(key, block * (LANES / 2) + pair);
        (*signs)[2 * pair] = (uint32_t)random;
        (*signs)[2 * pair + 1] = (uint32_t)(random >> 32);
    }
}

/* Encoded blocks hold a 16th of the rotated values, and are unpacked in 32nds: so no sum overflows, however large the
 * finite values of a block are. */
#define ENCODED_FACTOR 0x3b800000u /* 1/256, as TRANSFORM multiplies by 16 */
#define DECODED_FACTOR 0x42000000u /* 32 */
#define ROTATED_ZERO_BITS (ZERO_BITS - (4u << 23))
#define CLAMPED_SCALE 0x7a00u /* 2^117: with smaller scales no decoded value reaches the largest float */

/* Multiplies vector i by plus or minus the factor. */
TARGET static inline void flip(vector *value, const vector_bits *signs, size_t i, uint32_t factor)
{
    *value *= (vector)((*signs << (uint32_t)(31 - i) & SIGN_BIT) | factor);
}

/* Limits finite magnitudes to what becomes the largest float with DECODED_FACTOR. NaN stays NaN. */
TARGET static inline void clamp(vector *value)
{
    const vector most = (vector){0} + FLT_MAX / 32;
    vector_bits above = (vector_bits)(*value > most), below = (vector_bits)(*value < -most);
    vector_bits inside = (vector_bits)*value & ~(above | below);
    *value = (vector)(inside | ((vector_bits)most & above) | ((vector_bits)-most & below));
}

/* Stages of the transform between vectors, and within them: there the partner of each lane, and -1 for the second lane
 * of each pair. */
#define STAGE_BETWEEN(STRIDE)                                                                                          \
    EACH_VECTOR if ((i & (STRIDE)) == 0)                                                                               \
    {                                                                                                                  \
        vector a = v[i], b = v[i + (STRIDE)];                                                                          \
        v[i] = a + b;                                                                                                  \
        v[i + (STRIDE)] = a - b;                                                                                       \
    }
#define STAGE_WITHIN(PARTNERS, SECONDS)                                                                                \
    EACH_VECTOR v[i] = __builtin_shufflevector(v[i], v[i], PARTNERS) + v[i] * (vector){SECONDS};
#define PARTNERS_8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define SECONDS_8 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1
#define PARTNERS_4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define SECONDS_4 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1
#define PARTNERS_2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define SECONDS_2 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1
#define PARTNERS_1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define SECONDS_1 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1

/* 16 times the orthonormal Walsh-Hadamard transform of the block. */
#define TRANSFORM                                                                                                      \
    STAGE_BETWEEN(8)                                                                                                   \
    STAGE_BETWEEN(4)                                                                                                   \
    STAGE_BETWEEN(2)                                                                                                   \
    STAGE_BETWEEN(1)                                                                                                   \
    STAGE_WITHIN(PARTNERS_8, SECONDS_8)                                                                                \
    STAGE_WITHIN(PARTNERS_4, SECONDS_4)                                                                                \
    STAGE_WITHIN(PARTNERS_2, SECONDS_2)                                                                                \
    STAGE_WITHIN(PARTNERS_1, SECONDS_1)

TARGET static inline void int4_encode_block(uint8_t *target, const float *source, size_t count, uint64_t key,
                                            uint64_t block)
{
    (void)count;
    float rotated[INT4_VALUES] __attribute__((aligned(64)));
    vector v[VECTORS];
    vector_bits signs;
    draw_signs(&signs, key, block);
    EACH_VECTOR
    {
        memcpy(&v[i], source + LANES * i, sizeof v[i]);
        flip(&v[i], &signs, i, ENCODED_FACTOR);
    }
    TRANSFORM
    memcpy(rotated, v, sizeof rotated);
    uint32_t largest = largest_bits(rotated, INT4_VALUES); /* values that are not finite reach every sum */
    uint16_t scale =
        scale_of(largest, 7.99f, ROTATED_ZERO_BITS); /* less than 8, so that the largest rounds to the last level */
    put_half(target, scale);
    if (scale == 0 || scale == NAN_HALF) {
        memset(target + SCALE_BYTES, 0, INT4_VALUES / 2);
        return;
    }
    float factor = 1 / bf16_value(scale);
    for (size_t i = 0; i < INT4_VALUES / 2; i++) {
        uint32_t low = bits_of(rotated[i] * factor + 7.5f + ROUNDER) - ROUNDER_BITS;
        uint32_t high = bits_of(rotated[i + INT4_VALUES / 2] * factor + 7.5f + ROUNDER) - ROUNDER_BITS;
        target[SCALE_BYTES + i] = (uint8_t)(low | high << 4);
    }
}

/* The decoded block, or with `sum` that added to it. */
TARGET static inline void int4_unpack_block(float *target, const uint8_t *source, uint64_t key, uint64_t block,
                                            const float *sum)
{
    float rotated[INT4_VALUES] __attribute__((aligned(64)));
    vector v[VECTORS];
    uint16_t scale = get_half(source);
    float half = bf16_value(scale) / (2 * 32); /* levels are odd multiples of it */
    for (size_t i = 0; i < INT4_VALUES / 2; i++) {
        rotated[i] = (float)(2 * (source[SCALE_BYTES + i] & 15) - 15) * half;
        rotated[i + INT4_VALUES / 2] = (float)(2 * (source[SCALE_BYTES + i] >> 4) - 15) * half;
    }
    memcpy(v, rotated, sizeof rotated);
    TRANSFORM
    vector_bits signs;
    draw_signs(&signs, key, block);
    if (scale >= CLAMPED_SCALE)
        EACH_VECTOR clamp(&v[i]);
    EACH_VECTOR
    {
        vector value = v[i], before;
        flip(&value, &signs, i, DECODED_FACTOR);
        if (sum != NULL) {
            memcpy(&before, sum + LANES * i, sizeof before);
            value = before + value;
        }
        memcpy(target + LANES * i, &value, sizeof value);
    }
}

TARGET static inline void int4_decode_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    int4_unpack_block(target, source, key, block, NULL);
}

TARGET static inline void int4_add_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    int4_unpack_block(target, source, key, block, target);
}

/* ---- sign: bit i of byte j is the sign of value 16 i + j ---- */

#define NATIVE_LANES (F16_LANES > 4 ? F16_LANES : 4)
#define EACH_SIGN_VECTOR _Pragma("GCC unroll 8") for (size_t i = 0; i < SIGN_VALUES / LANES; i++)
#define EACH_NATIVE_VECTOR _Pragma("GCC unroll 4") for (size_t j = 0; j < LANES; j += NATIVE_LANES)

/* Vectors as wide as those of the level: gcc 12 shifts wider vectors one lane at a time. */
typedef float native __attribute__((vector_size(4 * NATIVE_LANES)));
typedef uint32_t native_bits __attribute__((vector_size(4 * NATIVE_LANES)));

/* The mean of `count` magnitudes as the upper half of an f32, from a 128th of their sum. */
TARGET static inline uint16_t mean_scale(float sum, size_t count)
{
    if ((bits_of(sum) & ~SIGN_BIT) >= NOT_FINITE_BITS)
        return NAN_HALF;
    uint32_t mean = bits_of(sum * ((float)SIGN_VALUES / (float)count));
    if (mean < ZERO_BITS)
        return 0;
    return bf16_nearest(mean < LARGEST_BITS ? mean : LARGEST_BITS);
}

TARGET static inline void sign_encode_block(uint8_t *target, const float *source, size_t count, uint64_t key,
                                            uint64_t block)
{
    (void)key, (void)block;
    float sums[LANES];
    uint32_t signs[LANES];
    EACH_NATIVE_VECTOR
    {
        native sum = {0}, value;
        native_bits sign = {0};
        EACH_SIGN_VECTOR
        {
            memcpy(&value, source + LANES * i + j, sizeof value);
            native_bits bits = (native_bits)(value + (native){0});    /* -0 becomes 0 */
            sum += (native)(bits & ~SIGN_BIT) * (1.0f / SIGN_VALUES); /* finite magnitudes cannot overflow */
            sign = sign >> 1 | (bits & SIGN_BIT);
        }
        memcpy(sums + j, &sum, sizeof sum);
        memcpy(signs + j, &sign, sizeof sign);
    }
    for (size_t stride = LANES / 2; stride > 0; stride /= 2)
        for (size_t j = 0; j < stride; j++)
            sums[j] += sums[j + stride];
    uint16_t scale = mean_scale(sums[0], count);
    put_half(target, scale);
    for (size_t j = 0; j < LANES; j++)
        target[SCALE_BYTES + j] = (uint8_t)(signs[j] >> 24);
    if (scale == 0)
        memset(target + SCALE_BYTES, 0, SIGN_VALUES / 8);
}

/* The decoded block, or with `sum` that added to it. */
TARGET static inline void sign_unpack_block(float *target, const uint8_t *source, const float *sum)
{
    uint32_t signs[LANES], scale = (uint32_t)get_half(source) << 16;
    for (size_t j = 0; j < LANES; j++)
        signs[j] = source[SCALE_BYTES + j];
    EACH_NATIVE_VECTOR
    {
        native_bits sign;
        memcpy(&sign, signs + j, sizeof sign);
        EACH_SIGN_VECTOR
        {
            native value = (native)((sign << (uint32_t)(31 - i) & SIGN_BIT) | scale), before;
            if (sum != NULL) {
                memcpy(&before, sum + LANES * i + j, sizeof before);
                value = before + value;
            }
            memcpy(target + LANES * i + j, &value, sizeof value);
        }
    }
}

TARGET static inline void sign_decode_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    (void)key, (void)block;
    sign_unpack_block(target, source, NULL);
}

TARGET static inline void sign_add_block(float *target, const uint8_t *source, uint64_t key, uint64_t block)
{
    (void)key, (void)block;
    sign_unpack_block(target, source, target);
}

/* ---- whole blocks, and the last one ---- */

/* A block is encoded from VALUES values, of which the first `count` exist and the others are zeros. */
#define CODEC(name, VALUES, BYTES)                                                                                     \
    CL_CODEC_BLOCK_FITS(VALUES, BYTES);                                                                                \
    TARGET static void name##_encode(uint8_t *target, const float *source, size_t count, struct cl_codec_place place)  \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        for (; count >= (VALUES); count -= (VALUES), source += (VALUES), target += (BYTES))                            \
            name##_encode_block(target, source, VALUES, place.key, place.block++);                                     \
        if (count > 0) {                                                                                               \
            float last[VALUES] = {0};                                                                                  \
            memcpy(last, source, count * sizeof *last);                                                                \
            name##_encode_block(target, last, count, place.key, place.block);                                          \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void name##_decode(float *target, const uint8_t *source, size_t count, struct cl_codec_place place)  \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        for (; count >= (VALUES); count -= (VALUES), target += (VALUES), source += (BYTES))                            \
            name##_decode_block(target, source, place.key, place.block++);                                             \
        if (count > 0) {                                                                                               \
            float last[VALUES];                                                                                        \
            name##_decode_block(last, source, place.key, place.block);                                                 \
            memcpy(target, last, count * sizeof *last);                                                                \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void name##_decode_add(float *target, const uint8_t *source, size_t count,                           \
                                         struct cl_codec_place place)                                                  \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        for (; count >= (VALUES); count -= (VALUES), target += (VALUES), source += (BYTES))                            \
            name##_add_block(target, source, place.key, place.block++);                                                \
        if (count > 0) {                                                                                               \
            float last[VALUES] = {0};                                                                                  \
            memcpy(last, target, count * sizeof *last);                                                                \
            name##_add_block(last, source, place.key, place.block);                                                    \
            memcpy(target, last, count * sizeof *last);                                                                \
        }                                                                                                              \
    }

CODEC(int8, INT8_VALUES, SCALE_BYTES + INT8_VALUES)
CODEC(int4, INT4_VALUES, SCALE_BYTES + INT4_VALUES / 2)
CODEC(sign, SIGN_VALUES, SCALE_BYTES + SIGN_VALUES / 8)

static const struct cl_codec codecs[CL_CODECS] = {
    [CL_CODEC_F16] = {"f16", 1, 2, f16_encode, f16_decode, f16_decode_add},
    [CL_CODEC_BF16] = {"bf16", 1, 2, bf16_encode, bf16_decode, bf16_decode_add},
    [CL_CODEC_INT8] = {"int8", INT8_VALUES, SCALE_BYTES + INT8_VALUES, int8_encode, int8_decode, int8_decode_add},
    [CL_CODEC_INT4] = {"int4", INT4_VALUES, SCALE_BYTES + INT4_VALUES / 2, int4_encode, int4_decode, int4_decode_add},
    [CL_CODEC_SIGN] = {"sign", SIGN_VALUES, SCALE_BYTES + SIGN_VALUES / 8, sign_encode, sign_decode, sign_decode_add},
};
