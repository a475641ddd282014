/* The level that every machine has: plain C, with f16 conversions in integers (after Fabian Giesen, public domain). */
#include "kernels/codec.h"
#include "kernels/level.h"

#define LEVEL cl_level_scalar
#define LEVEL_NAME "scalar"
#define TARGET
#define F16_LANES 1

typedef float floats;

/* A choice without a branch, so that loops can be vectorised: compilers may not run float arithmetic speculatively. */
static inline uint32_t pick(int condition, uint32_t yes, uint32_t no)
{
    return no ^ ((yes ^ no) & -(uint32_t)condition);
}

static inline float f16_load(const void *address)
{
    uint16_t half;
    memcpy(&half, address, sizeof half);
    const uint32_t exponent_mask = 0x7c00u << 13, smallest_normal = 113u << 23; /* 2^-14 as f32 */
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, shifted = (uint32_t)(half & 0x7fff) << 13;
    uint32_t normal = shifted + ((127u - 15u) << 23), infinite = normal + ((128u - 16u) << 23);
    /* A subnormal is a mantissa without its leading one: put one there, subtract it as a float. */
    uint32_t subnormal = bits_of(float_of(shifted + smallest_normal) - float_of(smallest_normal));
    uint32_t exponent = shifted & exponent_mask;
    uint32_t bits = pick(exponent == 0, subnormal, pick(exponent == exponent_mask, infinite, normal));
    return float_of(bits | sign);
}

static inline void f16_store(void *address, float value)
{
    const uint32_t infinity = 255u << 23, overflow = 143u << 23 /* 65536 */, smallest_normal = 113u << 23;
    const uint32_t half_ulp = 126u << 23; /* 0.5, whose f32 ulp is that of f16 subnormals: adding it rounds to them */
    uint32_t sign = bits_of(value) & 0x80000000, bits = bits_of(value) ^ sign;
    uint32_t quiet = 0x7e00 | (bits >> 13 & 0x3ff); /* a NaN keeps its upper bits, as in F16C */
    uint32_t special = pick(bits > infinity, quiet, 0x7c00);
    uint32_t subnormal = bits_of(float_of(bits) + float_of(half_ulp)) - half_ulp;
    uint32_t normal = (bits - ((127u - 15u) << 23) + 0xfff + (bits >> 13 & 1)) >> 13; /* may carry into infinity */
    uint32_t rounded = pick(bits >= overflow, special, pick(bits < smallest_normal, subnormal, normal));
    uint16_t half = (uint16_t)(rounded | sign >> 16);
    memcpy(address, &half, sizeof half);
}

static inline float floats_set(float value)
{
    return value;
}
static inline float floats_min(float a, float b)
{
    return a < b || a != a ? a : b;
}
static inline float floats_max(float a, float b)
{
    return a > b || a != a ? a : b;
}

static void nh(uint64_t sums[2], const uint8_t *bytes, size_t length, const uint32_t *first, const uint32_t *second)
{
    for (size_t i = 0; i < length / 4; i += 2) {
        uint32_t pair[2];
        memcpy(pair, bytes + 4 * i, sizeof pair);
        sums[0] += (uint64_t)(uint32_t)(pair[0] + first[i]) * (uint32_t)(pair[1] + first[i + 1]);
        sums[1] += (uint64_t)(uint32_t)(pair[0] + second[i]) * (uint32_t)(pair[1] + second[i + 1]);
    }
}

#include "kernels/codec_template.h"
#include "kernels/difference_template.h"
#include "kernels/select_template.h"
/* Last, as it defines the level. */
#include "kernels/reduce_template.h"
