/* AVX2 with F16C: Intel since 2013, AMD since 2015. */
#include "kernels/codec.h"
#include "kernels/level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL cl_level_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c,popcnt")))
#define F16_LANES 8

typedef __m256 floats;

TARGET static inline floats f16_load(const void *address)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(address));
}

TARGET static inline void f16_store(void *address, floats value)
{
    _mm_storeu_si128(address, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

TARGET static inline floats floats_set(float value)
{
    return _mm256_set1_ps(value);
}

/* a is not compared with itself: clang 14 moves that comparison before the conversion and runs it lane by lane. */
TARGET static inline floats is_nan(floats a)
{
    __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
}

/* The instruction gives b if a or b is NaN: wrong only if a is. */
TARGET static inline floats floats_min(floats a, floats b)
{
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, is_nan(a));
}

TARGET static inline floats floats_max(floats a, floats b)
{
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, is_nan(a));
}

#define FIND_LANES 8

TARGET static inline size_t find_lanes(uint32_t *found, const float *values, size_t i, uint32_t floor, uint32_t width)
{
    /* The positions, one a byte, of the ones of four bits. */
    static const uint32_t ONES[16] = {0, 0,     1,     0x100,   2,     0x200,   0x201,   0x20100,
                                      3, 0x300, 0x301, 0x30100, 0x302, 0x30200, 0x30201, 0x3020100};
    /* Comparisons are signed: both sides are less by 2^31. */
    const __m256i least = _mm256_set1_epi32((int)(floor ^ 0x80000000)),
                  end = _mm256_set1_epi32((int)(width ^ 0x80000000));
    __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const void *)(values + i)), _mm256_set1_epi32(0x7fffffff));
    __m256i is_hit = _mm256_cmpgt_epi32(end, _mm256_sub_epi32(bits, least));
    uint32_t hits = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_hit)), count = 0;
    for (size_t j = 0; j < FIND_LANES; j += 4, hits >>= 4) {
        __m128i ones = _mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)ONES[hits & 15]));
        _mm_storeu_si128((void *)(found + count), _mm_add_epi32(ones, _mm_set1_epi32((int)(i + j))));
        count += (uint32_t)_mm_popcnt_u32(hits & 15);
    }
    return count;
}

TARGET static inline __m256i nh_products(__m256i words, const uint32_t *key)
{
    __m256i sums = _mm256_add_epi32(words, _mm256_loadu_si256((const void *)key));
    return _mm256_mul_epu32(sums, _mm256_srli_epi64(sums, 32));
}

TARGET static void nh(uint64_t sums[2], const uint8_t *bytes, size_t length, const uint32_t *first,
                      const uint32_t *second)
{
    __m256i totals[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t at = 0; at < length; at += sizeof totals[0]) {
        __m256i words = _mm256_loadu_si256((const void *)(bytes + at));
        totals[0] = _mm256_add_epi64(totals[0], nh_products(words, first + at / 4));
        totals[1] = _mm256_add_epi64(totals[1], nh_products(words, second + at / 4));
    }
    for (size_t i = 0; i < 2; i++) {
        uint64_t lanes[4];
        _mm256_storeu_si256((void *)lanes, totals[i]);
        for (size_t j = 0; j < 4; j++)
            sums[i] += lanes[j];
    }
}

#define HAS_UNEQUAL

TARGET static inline __m256i load_lanes(const uint8_t *bytes, unsigned i)
{
    return _mm256_loadu_si256((const void *)(bytes + sizeof(__m256i) * i));
}

TARGET static inline uint64_t unequal_1(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 2; i++) {
        __m256i equal = _mm256_cmpeq_epi8(load_lanes(left, i), load_lanes(right, i));
        bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(equal) << 32 * i;
    }
    return ~bits;
}

TARGET static inline uint64_t unequal_2(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 2; i++) {
        __m256i low = _mm256_cmpeq_epi16(load_lanes(left, 2 * i), load_lanes(right, 2 * i));
        __m256i high = _mm256_cmpeq_epi16(load_lanes(left, 2 * i + 1), load_lanes(right, 2 * i + 1));
        __m256i equal = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8); /* packs mixes the halves */
        bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(equal) << 32 * i;
    }
    return ~bits;
}

TARGET static inline uint64_t unequal_4(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 8; i++) {
        __m256i equal = _mm256_cmpeq_epi32(load_lanes(left, i), load_lanes(right, i));
        bits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(equal)) << 8 * i;
    }
    return ~bits;
}

TARGET static inline uint64_t unequal_8(const uint8_t *left, const uint8_t *right)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < 16; i++) {
        __m256i equal = _mm256_cmpeq_epi64(load_lanes(left, i), load_lanes(right, i));
        bits |= (uint64_t)(uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(equal)) << 4 * i;
    }
    return ~bits;
}

#include "kernels/codec_template.h"
#include "kernels/difference_template.h"
#include "kernels/select_template.h"
/* Last, as it defines the level. */
#include "kernels/reduce_template.h"
#endif
