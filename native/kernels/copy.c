#include "kernels/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

/*
 * Measured on Zen 5 with 1 MiB of L2: into cold memory both ways are equal up to 512 KiB; from 1 MiB on, streaming
 * takes 15 to 25 % less time, including the cache that it leaves to others. Into memory that is in L2 or L3, memcpy is
 * faster, up to three times.
 */
#define STREAM_MIN_BYTES ((size_t)1 << 20)
#define CACHE_LINE_BYTES 64

void cl_copy_stream(void *target, const void *source, size_t length)
{
    if (length < STREAM_MIN_BYTES || target == source) {
        memmove(target, source, length);
        return;
    }
    char *to = target;
    const char *from = source;
    size_t head = -(uintptr_t)to % CACHE_LINE_BYTES;
    memcpy(to, from, head);
    size_t lines = (length - head) / CACHE_LINE_BYTES, done = head + lines * CACHE_LINE_BYTES;
    for (size_t at = head; at < done; at += CACHE_LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const void *)(from + at)), b = _mm_loadu_si128((const void *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const void *)(from + at + 32)),
                d = _mm_loadu_si128((const void *)(from + at + 48));
        _mm_stream_si128((void *)(to + at), a);
        _mm_stream_si128((void *)(to + at + 16), b);
        _mm_stream_si128((void *)(to + at + 32), c);
        _mm_stream_si128((void *)(to + at + 48), d);
    }
    _mm_sfence(); /* later ordinary stores, by which other threads learn of the copy, must not overtake it */
    memcpy(to + done, from + done, length - done);
}
#else
void cl_copy_stream(void *target, const void *source, size_t length)
{
    memmove(target, source, length);
}
#endif
