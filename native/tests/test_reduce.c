/* The kernels of every level this machine has, bit for bit, against arithmetic written another way. */
#include "kernels/copy.h"
#include "kernels/level.h"
#include "kernels/reduce.h"
#include "tests/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OPS 7
#define MAX_COUNT 1000
#define MAX_BYTES (MAX_COUNT * 8)

static const struct {
    const char *name;
    size_t size;
    enum { UNSIGNED, SIGNED, FLOAT } kind;
    int mantissa_bits, exponent_min; /* of FLOAT */
} dtypes[] = {
    [CL_U8] = {"u8", 1, UNSIGNED, 0, 0},     [CL_I8] = {"i8", 1, SIGNED, 0, 0},
    [CL_I16] = {"i16", 2, SIGNED, 0, 0},     [CL_I32] = {"i32", 4, SIGNED, 0, 0},
    [CL_I64] = {"i64", 8, SIGNED, 0, 0},     [CL_F16] = {"f16", 2, FLOAT, 10, -14},
    [CL_BF16] = {"bf16", 2, FLOAT, 7, -126}, [CL_F32] = {"f32", 4, FLOAT, 23, -126},
    [CL_F64] = {"f64", 8, FLOAT, 52, -1022}, [CL_U16] = {"u16", 2, UNSIGNED, 0, 0},
    [CL_U32] = {"u32", 4, UNSIGNED, 0, 0},   [CL_U64] = {"u64", 8, UNSIGNED, 0, 0},
};
#define DTYPES (sizeof dtypes / sizeof *dtypes)

static const char *const level_names[] = {"scalar", "avx2", "avx512"};
#define LEVELS (sizeof level_names / sizeof *level_names)

/* A test that runs `body` on every level of this machine. */
static void on_each_level(void (*body)(void))
{
    for (size_t i = 0; i < LEVELS; i++)
        if (cl_kernels_select(level_names[i]) == CL_OK)
            body();
}

static uint64_t random_state = 88172645463325252u;

static uint64_t random_bits(void) /* xorshift64, Marsaglia 2003 */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* One element as its bits in the low bytes; little endian, as the network format is. */
static uint64_t load(const void *address, size_t size)
{
    uint64_t bits = 0;
    memcpy(&bits, address, size);
    return bits;
}

static int64_t sign_extended(uint64_t bits, size_t size)
{
    unsigned unused = (unsigned)(64 - 8 * size);
    return (int64_t)(bits << unused) >> unused;
}

/* IEEE 754 interchange formats of any width, by the definition. */
static double decoded(enum cl_dtype dtype, uint64_t bits)
{
    int mantissa_bits = dtypes[dtype].mantissa_bits, exponent_min = dtypes[dtype].exponent_min;
    uint64_t mantissa = bits & ((UINT64_C(1) << mantissa_bits) - 1);
    int exponent_max = -2 * exponent_min + 3; /* of infinities and NaN, as the biased field */
    int exponent = (int)(bits >> mantissa_bits) & exponent_max;
    double sign = bits >> (8 * dtypes[dtype].size - 1) & 1 ? -1.0 : 1.0;
    if (exponent == exponent_max)
        return mantissa != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp((double)mantissa, exponent_min - mantissa_bits);
    return sign * ldexp((double)(mantissa | UINT64_C(1) << mantissa_bits), exponent - 1 + exponent_min - mantissa_bits);
}

static uint64_t encoded(enum cl_dtype dtype, double value)
{
    int mantissa_bits = dtypes[dtype].mantissa_bits, exponent_min = dtypes[dtype].exponent_min;
    uint64_t infinity = (uint64_t)(-2 * exponent_min + 3) << mantissa_bits;
    uint64_t sign = (uint64_t)(signbit(value) != 0) << (8 * dtypes[dtype].size - 1);
    double magnitude = fabs(value);
    if (isnan(value))
        return infinity | 1;
    if (isinf(value))
        return sign | infinity;
    int exponent = magnitude > 0 && ilogb(magnitude) > exponent_min ? ilogb(magnitude) : exponent_min;
    uint64_t units = (uint64_t)nearbyint(ldexp(magnitude, mantissa_bits - exponent)); /* nearest even */
    /* The leading one of a normal number counts as one more exponent, and so does a carry from rounding. */
    uint64_t bits = ((uint64_t)(exponent - exponent_min) << mantissa_bits) + units;
    return sign | (bits < infinity ? bits : infinity);
}

static double operated(enum cl_op op, double a, double b)
{
    if (op == CL_SUM)
        return a + b;
    if (op == CL_PRODUCT)
        return a * b;
    if (isnan(a) || isnan(b))
        return (double)NAN;
    if (op == CL_MIN)
        return a < b ? a : b;
    return a > b ? a : b;
}

/* f64 arithmetic rounded to f32 once more is exact f32 arithmetic (Figueroa 1995). */
static double in_f32(enum cl_dtype dtype, double value)
{
    return dtype == CL_F64 ? value : (double)(float)value;
}

static uint64_t expected_reduce(enum cl_dtype dtype, enum cl_op op, uint64_t a, uint64_t b)
{
    size_t size = dtypes[dtype].size;
    if (dtypes[dtype].kind == FLOAT)
        return encoded(dtype, in_f32(dtype, operated(op, decoded(dtype, a), decoded(dtype, b))));
    if (op == CL_BAND || op == CL_BOR)
        return op == CL_BAND ? a & b : a | b;
    if (op == CL_BXOR)
        return a ^ b;
    if (op == CL_SUM || op == CL_PRODUCT)
        return (op == CL_SUM ? a + b : a * b) & UINT64_MAX >> (64 - 8 * size);
    int less = dtypes[dtype].kind == SIGNED ? sign_extended(a, size) < sign_extended(b, size) : a < b;
    return less == (op == CL_MIN) ? a : b;
}

static uint64_t expected_scale(enum cl_dtype dtype, uint64_t a, uint32_t divisor)
{
    size_t size = dtypes[dtype].size;
    if (dtypes[dtype].kind == FLOAT) {
        double d = in_f32(dtype, (double)divisor);
        return encoded(dtype, in_f32(dtype, decoded(dtype, a) / d));
    }
    if (dtypes[dtype].kind == UNSIGNED)
        return a / divisor;
    return (uint64_t)(sign_extended(a, size) / (int64_t)divisor) & UINT64_MAX >> (64 - 8 * size);
}

/* Every NaN equals every other. */
static int is_same(enum cl_dtype dtype, uint64_t a, uint64_t b)
{
    return a == b || (dtypes[dtype].kind == FLOAT && isnan(decoded(dtype, a)) && isnan(decoded(dtype, b)));
}

/* Any bit pattern, small numbers that round, and the corners. */
static void fill(enum cl_dtype dtype, uint8_t *bytes, size_t count)
{
    static const double corners[] = {0.0, -0.0, 1.0, -1.0, 65504.0, 65520.0, 6e-8, -1.2e-38, 1e-45, 3.39e38, 1.7e308};
    const size_t corner_count = sizeof corners / sizeof *corners, size = dtypes[dtype].size;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random_bits(), choice = random_bits() % 8;
        if (dtypes[dtype].kind == FLOAT && choice < 4)
            bits = encoded(dtype, (double)(int64_t)bits / 9e18);
        else if (dtypes[dtype].kind == FLOAT && choice < 6)
            bits = encoded(dtype, bits % 16 == 0   ? (double)NAN
                                  : bits % 16 == 1 ? (double)INFINITY
                                                   : corners[bits % corner_count]);
        memcpy(bytes + i * size, &bits, size);
    }
}

/* Bitwise operators are for integers. */
static int is_defined(enum cl_dtype dtype, unsigned op)
{
    return op <= CL_MAX || dtypes[dtype].kind != FLOAT;
}

/* A kernel's result in a buffer of exactly `count` elements, `offset` bytes into its allocation. */
static void check_reduce(enum cl_dtype dtype, enum cl_op op, size_t count, size_t target_offset, size_t source_offset)
{
    static uint8_t a[MAX_BYTES], b[MAX_BYTES];
    size_t size = dtypes[dtype].size, length = count * size, wrong = 0;
    fill(dtype, a, count);
    fill(dtype, b, count);
    uint8_t *target = malloc(target_offset + length + 1), *source = malloc(source_offset + length + 1);
    if (target == NULL || source == NULL)
        abort();
    memcpy(target + target_offset, a, length);
    memcpy(source + source_offset, b, length);
    target[target_offset + length] = source[source_offset + length] = 0xa5;
    cl_reduce_kernel(dtype, op)(target + target_offset, source + source_offset, count);
    for (size_t i = 0; i < count; i++) {
        uint64_t result = load(target + target_offset + i * size, size);
        wrong +=
            !is_same(dtype, result, expected_reduce(dtype, op, load(a + i * size, size), load(b + i * size, size)));
    }
    if (wrong > 0)
        fprintf(stderr, "%s op %d level %s, %zu elements: %zu wrong\n", dtypes[dtype].name, (int)op, cl_kernels_level(),
                count, wrong);
    CHECK_EQ(wrong, 0);
    CHECK_EQ(target[target_offset + length], 0xa5);
    CHECK(memcmp(source + source_offset, b, length) == 0);
    free(target);
    free(source);
}

static void reduce_on_level(void)
{
    for (unsigned dtype = 0; dtype < DTYPES; dtype++) {
        for (unsigned op = 0; op < OPS; op++) {
            if (!is_defined(dtype, op))
                continue;
            for (size_t count = 0; count < 68; count++)
                check_reduce(dtype, op, count, 0, 0);
            for (size_t offset = 0; offset < 4; offset++)
                check_reduce(dtype, op, MAX_COUNT - offset, offset, 2 * offset + 1);
        }
    }
}

TEST(test_reduce)
{
    printf("level %s\n", cl_kernels_level());
    on_each_level(reduce_on_level);
}

static void coinciding_on_level(void)
{
    static uint8_t before[MAX_BYTES], after[MAX_BYTES];
    for (unsigned dtype = 0; dtype < DTYPES; dtype++) {
        for (unsigned op = 0; op < OPS; op++) {
            if (!is_defined(dtype, op))
                continue;
            size_t size = dtypes[dtype].size, wrong = 0;
            fill(dtype, before, MAX_COUNT);
            memcpy(after, before, sizeof before);
            cl_reduce_kernel(dtype, op)(after, after, MAX_COUNT);
            for (size_t i = 0; i < MAX_COUNT; i++) {
                uint64_t bits = load(before + i * size, size);
                wrong += !is_same(dtype, load(after + i * size, size), expected_reduce(dtype, op, bits, bits));
            }
            CHECK_EQ(wrong, 0);
        }
    }
}

TEST(test_source_is_target)
{
    on_each_level(coinciding_on_level);
}

static void scale_on_level(void)
{
    static const uint32_t divisors[] = {1, 2, 3, 7, 8, 100, 255, 1000, 65537, 16777217, 2147483648u, 4294967295u};
    static uint8_t before[MAX_BYTES], after[MAX_BYTES + 1];
    for (unsigned dtype = 0; dtype < DTYPES; dtype++) {
        for (size_t d = 0; d < sizeof divisors / sizeof *divisors; d++) {
            for (size_t count = 0; count <= MAX_COUNT; count += count < 34 ? 1 : 322) {
                size_t size = dtypes[dtype].size, length = count * size, offset = count % 2, wrong = 0;
                fill(dtype, before, count);
                after[offset + length] = 0xa5;
                memcpy(after + offset, before, length);
                cl_scale_kernel(dtype)(after + offset, count, divisors[d]);
                for (size_t i = 0; i < count; i++) {
                    uint64_t result = load(after + offset + i * size, size);
                    uint64_t expected = expected_scale(dtype, load(before + i * size, size), divisors[d]);
                    wrong += !is_same(dtype, result, expected);
                }
                if (wrong > 0)
                    fprintf(stderr, "%s / %u level %s: %zu wrong\n", dtypes[dtype].name, (unsigned)divisors[d],
                            cl_kernels_level(), wrong);
                CHECK_EQ(wrong, 0);
                CHECK_EQ(after[offset + length], 0xa5);
            }
        }
    }
}

TEST(test_scale)
{
    on_each_level(scale_on_level);
}

/* Quotients next to whole numbers, where a float division could truncate to the wrong side. */
static void whole_quotients_on_level(void)
{
    for (uint32_t divisor = 1; divisor < 3000; divisor += 7) {
        uint32_t largest = UINT32_MAX / divisor * divisor;
        uint32_t values[4] = {largest - 1, largest, largest - divisor + 1, divisor - 1};
        uint32_t expected[4] = {(largest - 1) / divisor, largest / divisor, (largest - divisor + 1) / divisor,
                                (divisor - 1) / divisor};
        cl_scale_kernel(CL_U32)(values, 4, divisor);
        CHECK(memcmp(values, expected, sizeof values) == 0);
    }
}

TEST(test_scale_near_whole_quotients)
{
    on_each_level(whole_quotients_on_level);
}

/* Every f16 and bf16 against a handful: 1 and -0 alone show that both conversions lose nothing. */
TEST(test_every_half)
{
    static const double partners[] = {-0.0, 0.0, 1.0, -1.0, 3.0, 0.333, 1024.5, -6e-8, 6.2e-5, 1e-3, 65504.0, -3e38};
    static const enum cl_dtype halves[] = {CL_F16, CL_BF16};
    static uint16_t expected[65536], target[65536], source[65536];
    for (size_t h = 0; h < 2; h++) {
        for (unsigned op = 0; op <= CL_MAX; op++) {
            for (size_t p = 0; p < sizeof partners / sizeof *partners; p++) {
                uint16_t partner = (uint16_t)encoded(halves[h], partners[p]);
                for (size_t i = 0; i < 65536; i++)
                    expected[i] = (uint16_t)expected_reduce(halves[h], op, i, partner);
                for (size_t level = 0; level < LEVELS; level++) {
                    if (cl_kernels_select(level_names[level]) != CL_OK)
                        continue;
                    size_t wrong = 0;
                    for (size_t i = 0; i < 65536; i++) {
                        target[i] = (uint16_t)i;
                        source[i] = partner;
                    }
                    cl_reduce_kernel(halves[h], op)(target, source, 65536);
                    for (size_t i = 0; i < 65536; i++)
                        wrong += !is_same(halves[h], target[i], expected[i]);
                    if (wrong > 0)
                        fprintf(stderr, "%s op %u %g level %s: %zu wrong\n", dtypes[halves[h]].name, op, partners[p],
                                level_names[level], wrong);
                    CHECK_EQ(wrong, 0);
                }
            }
        }
    }
}

/* What torch gives: numbers halfway past the largest go to infinity, and no NaN becomes infinity or a number. */
static void half_corners_on_level(void)
{
    struct {
        enum cl_dtype dtype;
        uint16_t a, b, sum;
    } sums[] = {
        {CL_F16, 0x7bff, 0x4bff, 0x7bff},  /* 65504 + 15.99 stays */
        {CL_F16, 0x7bff, 0x4c00, 0x7c00},  /* 65504 + 16 is a tie, to even: infinity */
        {CL_F16, 0x0001, 0x0001, 0x0002},  /* subnormals add exactly */
        {CL_F16, 0x03ff, 0x0001, 0x0400},  /* the step from subnormal to normal */
        {CL_F16, 0x3c00, 0x1000, 0x3c00},  /* 1 + half an ulp: even */
        {CL_F16, 0x3c01, 0x1000, 0x3c02},  /* the next: even is up */
        {CL_BF16, 0x7f7f, 0x7b00, 0x7f80}, /* largest + half an ulp */
        {CL_BF16, 0x3f80, 0x3b80, 0x3f80}, /* 1 + half an ulp: even */
        {CL_BF16, 0x3f81, 0x3b80, 0x3f82}, /* the next: even is up */
        {CL_BF16, 0x0001, 0x0001, 0x0002}, /* subnormals */
    };
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
        cl_reduce_kernel(sums[i].dtype, CL_SUM)(&sums[i].a, &sums[i].b, 1);
        CHECK_EQ(sums[i].a, sums[i].sum);
    }
    uint16_t nan_payload_low = 0x7f81, zero = 0; /* its payload bits are all rounded away */
    cl_reduce_kernel(CL_BF16, CL_SUM)(&nan_payload_low, &zero, 1);
    CHECK((nan_payload_low & 0x7fff) > 0x7f80);
}

TEST(test_half_corners)
{
    on_each_level(half_corners_on_level);
}

static void copy_and_check(size_t length, size_t target_offset, size_t source_offset)
{
    uint8_t *target = malloc(target_offset + length + 1), *source = malloc(source_offset + length);
    if (target == NULL || source == NULL)
        abort();
    memset(target, 0xa5, target_offset + length + 1);
    for (size_t i = 0; i < length; i++)
        source[source_offset + i] = (uint8_t)(i * 31 + i / 256);
    cl_copy_stream(target + target_offset, source + source_offset, length);
    CHECK(memcmp(target + target_offset, source + source_offset, length) == 0);
    CHECK_EQ(target[target_offset + length], 0xa5);
    CHECK(target_offset == 0 || target[target_offset - 1] == 0xa5);
    free(target);
    free(source);
}

TEST(test_copy_stream)
{
    for (size_t length = 0; length < 200; length += 33)
        copy_and_check(length, length % 3, length % 5);
    for (size_t beyond = 0; beyond < 3; beyond++)
        copy_and_check(((size_t)1 << 20) - 1 + beyond, beyond, 0);
    for (size_t offset = 0; offset < 67; offset += 11)
        copy_and_check(((size_t)3 << 20) + offset * 7, offset, 66 - offset);
}

TEST(test_choice)
{
    CHECK_EQ(cl_kernels_select("scalar"), CL_OK);
    CHECK(strcmp(cl_kernels_level(), "scalar") == 0);
    CHECK_EQ(cl_kernels_select("sse9"), CL_EINVAL);
    CHECK_EQ(cl_kernels_select(NULL), CL_EINVAL);
    CHECK(strcmp(cl_kernels_level(), "scalar") == 0);
}

TEST(test_out_of_range)
{
    for (unsigned dtype = 0; dtype < DTYPES; dtype++) {
        CHECK_EQ(cl_dtype_size(dtype), dtypes[dtype].size);
        for (unsigned op = 0; op < OPS; op++)
            CHECK_EQ(cl_reduce_kernel(dtype, op) != NULL, is_defined(dtype, op));
    }
    CHECK_EQ(cl_dtype_size((enum cl_dtype)DTYPES), 0);
    CHECK_EQ(cl_dtype_size((enum cl_dtype) - 1), 0);
    CHECK(cl_reduce_kernel((enum cl_dtype)DTYPES, CL_SUM) == NULL);
    CHECK(cl_reduce_kernel(CL_F32, (enum cl_op)OPS) == NULL);
    CHECK(cl_reduce_kernel(CL_F32, (enum cl_op) - 1) == NULL);
    CHECK(cl_scale_kernel((enum cl_dtype)DTYPES) == NULL);
}
