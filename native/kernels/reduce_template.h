/*
 * All kernels of one level; each reduce_<level>.c includes this file once. They are plain loops, which the compiler
 * vectorises for the instructions named by TARGET. Before the inclusion the level defines, for f16 only but the first
 * two:
 *
 *   LEVEL, LEVEL_NAME   the table to define, and its name
 *   TARGET              attribute of every function
 *   F16_LANES, floats   how many f16 are converted at a time, and the vector of as many floats
 *   f16_load, f16_store the conversions, nearest even
 *   floats_set, floats_min, floats_max   (the last two like FLOAT_MIN and FLOAT_MAX below)
 *
 * No kernel multiplies and adds, so compilers have nothing to contract, and every level gives the same bits.
 */

#include <string.h>

#include "kernels/float_mode.h"

/* Packet payloads start at odd addresses and hold any type. */
#define ANY_ADDRESS __attribute__((aligned(1), may_alias))
typedef int8_t i8_at ANY_ADDRESS;
typedef int16_t i16_at ANY_ADDRESS;
typedef int32_t i32_at ANY_ADDRESS;
typedef int64_t i64_at ANY_ADDRESS;
typedef uint8_t u8_at ANY_ADDRESS;
typedef uint16_t u16_at ANY_ADDRESS;
typedef uint32_t u32_at ANY_ADDRESS;
typedef uint64_t u64_at ANY_ADDRESS;
typedef float f32_at ANY_ADDRESS;
typedef double f64_at ANY_ADDRESS;

/* Source and target may coincide, so they are not `restrict`. But no element depends on another. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* sanitizers keep loops from being vectorised: no error */
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* `wide` is the type to compute in, `mode` CL_IEEE_ARITHMETIC if that is floating-point. */
#define REDUCE(name, type, wide, mode, expression)                                                                     \
    TARGET static void name(void *target, const void *source, size_t count)                                            \
    {                                                                                                                  \
        mode;                                                                                                          \
        type##_at *t = target;                                                                                         \
        const type##_at *s = source;                                                                                   \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                                 \
        {                                                                                                              \
            wide a = t[i], b = s[i];                                                                                   \
            t[i] = (type##_at)(expression);                                                                            \
        }                                                                                                              \
    }

/* Sums, products and bitwise operations are the same for signed and unsigned integers, as they wrap. `wide` has at
 * least the width of `unsigned`: a product of promoted 16-bit values would overflow int. */
#define REDUCE_INTEGER(bits, wide)                                                                                     \
    REDUCE(sum_##bits, u##bits, wide, (void)0, a + b)                                                                  \
    REDUCE(product_##bits, u##bits, wide, (void)0, a *b)                                                               \
    REDUCE(min_i##bits, i##bits, int##bits##_t, (void)0, a < b ? a : b)                                                \
    REDUCE(max_i##bits, i##bits, int##bits##_t, (void)0, a > b ? a : b)                                                \
    REDUCE(min_u##bits, u##bits, uint##bits##_t, (void)0, a < b ? a : b)                                               \
    REDUCE(max_u##bits, u##bits, uint##bits##_t, (void)0, a > b ? a : b)                                               \
    REDUCE(band_##bits, u##bits, uint##bits##_t, (void)0, a &b)                                                        \
    REDUCE(bor_##bits, u##bits, uint##bits##_t, (void)0, a | b)                                                        \
    REDUCE(bxor_##bits, u##bits, uint##bits##_t, (void)0, a ^ b)

REDUCE_INTEGER(8, uint8_t)
REDUCE_INTEGER(16, uint32_t)
REDUCE_INTEGER(32, uint32_t)
REDUCE_INTEGER(64, uint64_t)

/* A NaN on either side is kept: the comparison then fails and gives b, which is wrong only if a is the NaN. */
#define FLOAT_MIN (a < b ? a : b)
#define FLOAT_MAX (a > b ? a : b)

#define REDUCE_FLOAT(bits, wide)                                                                                       \
    REDUCE(sum_f##bits, f##bits, wide, CL_IEEE_ARITHMETIC, a + b)                                                      \
    REDUCE(product_f##bits, f##bits, wide, CL_IEEE_ARITHMETIC, a *b)                                                   \
    REDUCE(min_f##bits, f##bits, wide, CL_IEEE_ARITHMETIC, a != a ? a : FLOAT_MIN)                                     \
    REDUCE(max_f##bits, f##bits, wide, CL_IEEE_ARITHMETIC, a != a ? a : FLOAT_MAX)

REDUCE_FLOAT(32, float)
REDUCE_FLOAT(64, double)

/* bf16 is the upper half of an f32. */
TARGET static inline float bf16_expand(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* Rounds to nearest even; may carry into infinity. A NaN needs no care: NaNs computed from bf16 have no bits that
 * carry. */
TARGET static inline uint16_t bf16_round(float value)
{
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define REDUCE_BF16(name, expression)                                                                                  \
    TARGET static void name(void *target, const void *source, size_t count)                                            \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        u16_at *t = target;                                                                                            \
        const u16_at *s = source;                                                                                      \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                                 \
        {                                                                                                              \
            float a = bf16_expand(t[i]), b = bf16_expand(s[i]);                                                        \
            t[i] = bf16_round(expression);                                                                             \
        }                                                                                                              \
    }

REDUCE_BF16(sum_bf16, a + b)
REDUCE_BF16(product_bf16, a *b)
REDUCE_BF16(min_bf16, a != a ? a : FLOAT_MIN)
REDUCE_BF16(max_bf16, a != a ? a : FLOAT_MAX)

/* Elements that do not fill a vector take the same path through a padded copy. */
#define REDUCE_F16(name, expression)                                                                                   \
    TARGET static void name(void *target, const void *source, size_t count)                                            \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        u16_at *t = target;                                                                                            \
        const u16_at *s = source;                                                                                      \
        size_t whole = count - count % F16_LANES, rest = (count - whole) * sizeof *t;                                  \
        for (size_t i = 0; i < whole; i += F16_LANES) {                                                                \
            floats a = f16_load(t + i), b = f16_load(s + i);                                                           \
            f16_store(t + i, expression);                                                                              \
        }                                                                                                              \
        if (rest > 0) {                                                                                                \
            uint16_t last_target[F16_LANES] = {0}, last_source[F16_LANES] = {0};                                       \
            memcpy(last_target, t + whole, rest);                                                                      \
            memcpy(last_source, s + whole, rest);                                                                      \
            floats a = f16_load(last_target), b = f16_load(last_source);                                               \
            f16_store(last_target, expression);                                                                        \
            memcpy(t + whole, last_target, rest);                                                                      \
        }                                                                                                              \
    }

REDUCE_F16(sum_f16, a + b)
REDUCE_F16(product_f16, a *b)
REDUCE_F16(min_f16, floats_min(a, b))
REDUCE_F16(max_f16, floats_max(a, b))

/* `quotient` of a and the divisor d, which is of type `wide`. */
#define SCALE(name, type, wide, quotient)                                                                              \
    TARGET static void name(void *target, size_t count, uint32_t divisor)                                              \
    {                                                                                                                  \
        CL_IEEE_ARITHMETIC;                                                                                            \
        type##_at *t = target;                                                                                         \
        const wide d = (wide)divisor;                                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                                 \
        {                                                                                                              \
            wide a = (wide)t[i];                                                                                       \
            t[i] = (type##_at)(quotient);                                                                              \
        }                                                                                                              \
    }

/* Integers up to 32 bits are divided in f64, which vector units can do. Truncation is then exact: a quotient a/d that
 * is not whole differs from the next whole number by at least 1/d, and the rounding error is below 2^32/d * 2^-53. */
SCALE(scale_i8, i8, double, (int32_t)(a / d))
SCALE(scale_u8, u8, double, (int32_t)(a / d))
SCALE(scale_i16, i16, double, (int32_t)(a / d))
SCALE(scale_u16, u16, double, (int32_t)(a / d))
SCALE(scale_i32, i32, double, a / d)
SCALE(scale_u32, u32, double, a / d)
SCALE(scale_i64, i64, int64_t, a / d)
SCALE(scale_u64, u64, uint64_t, a / d)
SCALE(scale_f32, f32, float, a / d)
SCALE(scale_f64, f64, double, a / d)

TARGET static void scale_bf16(void *target, size_t count, uint32_t divisor)
{
    CL_IEEE_ARITHMETIC;
    u16_at *t = target;
    const float d = (float)divisor;
    INDEPENDENT for (size_t i = 0; i < count; i++)
    {
        t[i] = bf16_round(bf16_expand(t[i]) / d);
    }
}

TARGET static void scale_f16(void *target, size_t count, uint32_t divisor)
{
    CL_IEEE_ARITHMETIC;
    u16_at *t = target;
    const floats d = floats_set((float)divisor);
    size_t whole = count - count % F16_LANES, rest = (count - whole) * sizeof *t;
    for (size_t i = 0; i < whole; i += F16_LANES)
        f16_store(t + i, f16_load(t + i) / d);
    if (rest > 0) {
        uint16_t last[F16_LANES] = {0};
        memcpy(last, t + whole, rest);
        f16_store(last, f16_load(last) / d);
        memcpy(t + whole, last, rest);
    }
}

#define OPS_FLOAT(type)                                                                                                \
    {                                                                                                                  \
        sum_##type, product_##type, min_##type, max_##type, NULL, NULL, NULL                                           \
    }
#define OPS(bits, type)                                                                                                \
    {                                                                                                                  \
        sum_##bits, product_##bits, min_##type, max_##type, band_##bits, bor_##bits, bxor_##bits                       \
    }

const struct cl_level LEVEL = {
    .name = LEVEL_NAME,
    .reduce =
        {
            [CL_U8] = OPS(8, u8),
            [CL_I8] = OPS(8, i8),
            [CL_I16] = OPS(16, i16),
            [CL_I32] = OPS(32, i32),
            [CL_I64] = OPS(64, i64),
            [CL_F16] = OPS_FLOAT(f16),
            [CL_BF16] = OPS_FLOAT(bf16),
            [CL_F32] = OPS_FLOAT(f32),
            [CL_F64] = OPS_FLOAT(f64),
            [CL_U16] = OPS(16, u16),
            [CL_U32] = OPS(32, u32),
            [CL_U64] = OPS(64, u64),
        },
    .scale =
        {
            [CL_U8] = scale_u8,
            [CL_I8] = scale_i8,
            [CL_I16] = scale_i16,
            [CL_I32] = scale_i32,
            [CL_I64] = scale_i64,
            [CL_F16] = scale_f16,
            [CL_BF16] = scale_bf16,
            [CL_F32] = scale_f32,
            [CL_F64] = scale_f64,
            [CL_U16] = scale_u16,
            [CL_U32] = scale_u32,
            [CL_U64] = scale_u64,
        },
    .codecs = codecs,
    .find = find,
    .nh = nh,
    .changed = changed,
};
