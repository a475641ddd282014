/* Level: all kernels for one instruction set. */
#pragma once

#include <string.h>

#include "commlayer.h"
#include "kernels/kernel.h"

#define CL_DTYPES 12
#define CL_OPS 7

struct cl_codec;

struct cl_level {
    const char *name;
    cl_reduce_fn reduce[CL_DTYPES][CL_OPS];
    cl_scale_fn scale[CL_DTYPES];
    const struct cl_codec *codecs; /* a row for each enum cl_codec_kind */
    /* Writes the positions of the values whose magnitude, as bits, is at least `floor` and below `ceiling`; returns how
     * many. `found` has room for all. */
    size_t (*find)(uint32_t *found, const float *values, size_t count, uint32_t floor, uint32_t ceiling);
    /* Adds the sums of whole chunks to `sums`: see nh.h. */
    void (*nh)(uint64_t sums[2], const uint8_t *bytes, size_t length, const uint32_t *first, const uint32_t *second);
    /* Writes the places, ascending, at which two arrays differ; returns how many. `places` has room for one more than
     * `count`, which is at most 2^15. value_bytes: 1, 2, 4 or 8. */
    size_t (*changed)(uint16_t *places, const void *left, const void *right, size_t count, unsigned value_bytes);
};

extern const struct cl_level cl_level_scalar;
#if defined(__x86_64__)
extern const struct cl_level cl_level_avx2;
extern const struct cl_level cl_level_avx512;
#endif

/* The best level that the CPU has, or the one that a test selected. */
const struct cl_level *cl_level_current(void);

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
