/* AVX-512 F, BW, VL and DQ: Intel servers since 2017, AMD since 2022. */
#include "kernels/codec.h"
#include "kernels/level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL cl_level_avx512
#define LEVEL_NAME "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,popcnt")))
#define F16_LANES 16

typedef __m512 floats;

TARGET static inline floats f16_load(const void *address)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(address));
}

/* The masked form with a full mask: the plain intrinsic fails -Wsign-conversion in gcc -O0. */
TARGET static inline void f16_store(void *address, floats value)
{
    _mm256_storeu_si256(address, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

TARGET static inline floats floats_set(float value)
{
    return _mm512_set1_ps(value);
}

/* a is not compared with itself: clang 14 moves that comparison before the conversion and runs it lane by lane. */
TARGET static inline __mmask16 is_nan(floats a)
{
    return _mm512_fpclass_ps_mask(a, 0x81 /* quiet, signalling */);
}

/* The instruction gives b if a or b is NaN: wrong only if a is. */
TARGET static inline floats floats_min(floats a, floats b)
{
    return _mm512_mask_blend_ps(is_nan(a), _mm512_min_ps(a, b), a);
}

TARGET static inline floats floats_max(floats a, floats b)
{
    return _mm512_mask_blend_ps(is_nan(a), _mm512_max_ps(a, b), a);
}

#define FIND_LANES 16

TARGET static inline size_t find_lanes(uint32_t *found, const float *values, size_t i, uint32_t floor, uint32_t width)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i bits = _mm512_and_si512(_mm512_loadu_si512(values + i), _mm512_set1_epi32(0x7fffffff));
    __m512i excess = _mm512_sub_epi32(bits, _mm512_set1_epi32((int)floor));
    __mmask16 hits = _mm512_cmplt_epu32_mask(excess, _mm512_set1_epi32((int)width));
    _mm512_storeu_si512(found, _mm512_maskz_compress_epi32(hits, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i))));
    return (size_t)_mm_popcnt_u32(hits);
}

TARGET static inline __m512i nh_products(__m512i words, const uint32_t *key)
{
    __m512i sums = _mm512_add_epi32(words, _mm512_loadu_si512((const void *)key));
    return _mm512_mul_epu32(sums, _mm512_srli_epi64(sums, 32));
}

TARGET static void nh(uint64_t sums[2], const uint8_t *bytes, size_t length, const uint32_t *first,
                      const uint32_t *second)
{
    __m512i totals[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (size_t at = 0; at < length; at += sizeof totals[0]) {
        __m512i words = _mm512_loadu_si512((const void *)(bytes + at));
        totals[0] = _mm512_add_epi64(totals[0], nh_products(words, first + at / 4));
        totals[1] = _mm512_add_epi64(totals[1], nh_products(words, second + at / 4));
    }
    for (size_t i = 0; i < 2; i++) {
        uint64_t lanes[8];
        _mm512_storeu_si512((void *)lanes, totals[i]);
        for (size_t j = 0; j < 8; j++)
            sums[i] += lanes[j];
    }
}

#define HAS_UNEQUAL

TARGET static inline uint64_t unequal_1(const uint8_t *left, const uint8_t *right)
{
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(left), _mm512_loadu_si512(right));
}

TARGET static inline uint64_t unequal_2(const uint8_t *left, const uint8_t *right)
{
    uint64_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(left), _mm512_loadu_si512(right));
    uint64_t high = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(left + 64), _mm512_loadu_si512(right + 64));
    return low | high << 32;
}

TARGET static inline uint64_t unequal_4(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 4; i++)
        bits |=
            (uint64_t)_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(left + 64 * i), _mm512_loadu_si512(right + 64 * i))
            << 16 * i;
    return bits;
}

TARGET static inline uint64_t unequal_8(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 8; i++)
        bits |=
            (uint64_t)_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(left + 64 * i), _mm512_loadu_si512(right + 64 * i))
            << 8 * i;
    return bits;
}

#include "kernels/codec_template.h"
#include "kernels/difference_template.h"
#include "kernels/select_template.h"
/* Last, as it defines the level. */
#include "kernels/reduce_template.h"
#endif
