#include "sim/element.h"

#include <math.h>
#include <string.h>

#include "sim/random.h"

static const struct {
    const char *name;
    uint32_t bytes;
    bool is_float, is_signed;
    int64_t exact; /* whole numbers up to this are exact */
} KINDS[] = {
    [CL_U8] = {"u8", 1, false, false, 0},        [CL_I8] = {"i8", 1, false, true, 0},
    [CL_I16] = {"i16", 2, false, true, 0},       [CL_I32] = {"i32", 4, false, true, 0},
    [CL_I64] = {"i64", 8, false, true, 0},       [CL_F16] = {"f16", 2, true, true, 1 << 11},
    [CL_BF16] = {"bf16", 2, true, true, 1 << 8}, [CL_F32] = {"f32", 4, true, true, 1 << 24},
    [CL_F64] = {"f64", 8, true, true, 1l << 40}, [CL_U16] = {"u16", 2, false, false, 0},
    [CL_U32] = {"u32", 4, false, false, 0},      [CL_U64] = {"u64", 8, false, false, 0},
};
enum { DTYPES = sizeof KINDS / sizeof *KINDS };

const char *sim_element_name(enum cl_dtype dtype)
{
    return KINDS[dtype].name;
}

bool sim_element_is_float(enum cl_dtype dtype)
{
    return KINDS[dtype].is_float;
}

enum cl_dtype sim_element_dtype(uint32_t itemsize, uint64_t n)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < DTYPES; i++)
        count += KINDS[i].bytes == itemsize;
    uint64_t left = count > 0 ? n % count : 0;
    for (uint32_t i = 0; i < DTYPES; i++)
        if (KINDS[i].bytes == itemsize && left-- == 0)
            return (enum cl_dtype)i;
    return CL_U8;
}

enum cl_dtype sim_element_float(uint32_t itemsize, uint64_t n)
{
    while (!KINDS[sim_element_dtype(itemsize, n)].is_float)
        n++;
    return sim_element_dtype(itemsize, n);
}

int64_t sim_element_value(enum cl_dtype dtype, enum cl_op op, uint32_t ranks, uint32_t rank, uint64_t seed,
                          uint64_t index)
{
    int64_t most = SIM_SMALL;
    if (KINDS[dtype].is_float && op == CL_SUM && KINDS[dtype].exact / ranks < most) {
        most = KINDS[dtype].exact / ranks;
        if (most == 0) /* too many ranks: not all of them can contribute */
            most = rank < KINDS[dtype].exact;
    }
    uint64_t hash = sim_mix(seed + sim_mix(index * 0x9E3779B97F4A7C15u + rank));
    if (KINDS[dtype].is_float && op == CL_PRODUCT && rank > 0)
        return hash & 1 ? 1 : -1; /* one factor of any size is enough */
    int64_t value = (int64_t)(hash % (2 * (uint64_t)most + 1)) - most;
    if (value == 0 && most > 0)
        value = most; /* so that a missing or repeated contribution shows */
    return KINDS[dtype].is_signed ? value : value < 0 ? -value : value;
}

/* A whole number wrapped to an element of this size. */
static int64_t wrap(enum cl_dtype dtype, int64_t value)
{
    uint32_t bits = 8 * KINDS[dtype].bytes;
    if (KINDS[dtype].is_float || bits == 64)
        return value;
    uint64_t low = (uint64_t)value & (((uint64_t)1 << bits) - 1);
    bool negative = KINDS[dtype].is_signed && low >> (bits - 1);
    return (int64_t)(negative ? low | ~(uint64_t)0 << bits : low);
}

int64_t sim_element_reduce(enum cl_dtype dtype, enum cl_op op, int64_t left, int64_t right)
{
    if (KINDS[dtype].is_float && (left <= SIM_NAN_LOW || right <= SIM_NAN_LOW))
        return SIM_NAN;
    switch (op) {
    case CL_SUM:
        return wrap(dtype, (int64_t)((uint64_t)left + (uint64_t)right));
    case CL_PRODUCT:
        return wrap(dtype, (int64_t)((uint64_t)left * (uint64_t)right));
    case CL_MIN:
        return left < right ? left : right;
    default: /* CL_MAX: others are not drawn */
        return left > right ? left : right;
    case CL_BAND:
        return left & right;
    case CL_BOR:
        return left | right;
    case CL_BXOR:
        return left ^ right;
    }
}

/* The 16 bits of a float with `fraction` bits of fraction and the given least exponent. No value here overflows. */
static uint16_t round_to(float value, int fraction, int bias)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    if (magnitude == 0)
        return sign;
    int exponent;
    frexpf(magnitude, &exponent); /* magnitude = [0.5, 1) * 2 ^ exponent */
    int biased = exponent - 1 + bias;
    if (biased < 1)
        biased = 1; /* subnormal: fixed exponent, no leading one */
    /* units of the last place; nearbyint rounds to even */
    double units = nearbyint(ldexp((double)magnitude, fraction - (biased - bias)));
    uint32_t whole = (uint32_t)units;
    /* a leading one adds 1 to the exponent below it, and a carry another */
    return (uint16_t)(sign | (((uint32_t)(biased - 1) << fraction) + whole));
}

/* All bits of the exponent, by size: 2 (f16, bf16), 4 or 8 bytes; a number with them and a fraction is NaN. */
static uint64_t exponent_bits(enum cl_dtype dtype)
{
    return dtype == CL_F16 ? 0x7C00 : dtype == CL_BF16 ? 0x7F80 : dtype == CL_F32 ? 0x7F800000 : 0x7FF0000000000000;
}

static void write_nan(enum cl_dtype dtype, void *to, bool low)
{
    uint64_t exponent = exponent_bits(dtype), lowest = exponent & -exponent;
    uint64_t bits = exponent | (low ? 1 : lowest / 2);
    memcpy(to, &bits, KINDS[dtype].bytes); /* little-endian */
}

static bool is_nan(enum cl_dtype dtype, const uint8_t *from)
{
    uint64_t bits = 0, exponent = exponent_bits(dtype);
    memcpy(&bits, from, KINDS[dtype].bytes);
    return KINDS[dtype].is_float && (bits & exponent) == exponent && (bits & ((exponent & -exponent) - 1)) != 0;
}

uint64_t sim_element_difference(enum cl_dtype dtype, const uint8_t *left, const uint8_t *right, uint64_t bytes)
{
    uint64_t size = KINDS[dtype].bytes;
    if (memcmp(left, right, bytes) == 0)
        return bytes;
    for (uint64_t at = 0; at < bytes; at += size) {
        uint64_t length = bytes - at < size ? bytes - at : size;
        if (memcmp(left + at, right + at, length) != 0 &&
            !(length == size && is_nan(dtype, left + at) && is_nan(dtype, right + at)))
            return at;
    }
    return bytes;
}

void sim_element_write(enum cl_dtype dtype, void *to, int64_t value, uint32_t divisor)
{
    if (KINDS[dtype].is_float && value <= SIM_NAN_LOW) {
        write_nan(dtype, to, value == SIM_NAN_LOW);
        return;
    }
    float single = (float)value / (float)divisor;
    double twice = (double)value / divisor;
    uint16_t half = 0;
    int64_t whole = KINDS[dtype].is_signed ? value / (int64_t)divisor : (int64_t)((uint64_t)value / divisor);
    switch (dtype) {
    case CL_F16:
        half = round_to(single, 10, 15);
        memcpy(to, &half, sizeof half);
        return;
    case CL_BF16:
        half = round_to(single, 7, 127);
        memcpy(to, &half, sizeof half);
        return;
    case CL_F32:
        memcpy(to, &single, sizeof single);
        return;
    case CL_F64:
        memcpy(to, &twice, sizeof twice);
        return;
    default:
        memcpy(to, &whole, KINDS[dtype].bytes); /* little-endian */
    }
}
