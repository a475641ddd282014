/* AVX-512 F, BW, VL and DQ: Intel servers since 2017, AMD since 2022. */
#include "kernels/codec.h"
#include "kernels/level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LEVEL cl_level_avx512
#define LEVEL_NAME "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
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

/* Not by comparing a with itself: clang 14 moves that comparison before the conversion and runs it lane by lane. */
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

#include "kernels/codec_template.h"
#include "kernels/reduce_template.h"
#endif
