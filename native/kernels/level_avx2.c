/* AVX2 with F16C: Intel since 2013, AMD since 2015. */
#include "kernels/codec.h"
#include "kernels/level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL cl_level_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c")))
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

/* Not by comparing a with itself: clang 14 moves that comparison before the conversion and runs it lane by lane. */
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

#include "kernels/codec_template.h"
#include "kernels/reduce_template.h"
#endif
