/*
 * A radix selection from the top bits down. Each pass over the values narrows the bucket, a range of magnitudes, that
 * holds the k-th largest. While a pass counts, it raises its floor: magnitudes below the k-th largest so far need no
 * count, and the search for those above runs at the speed of memory.
 *
 * The values are read twice: once to count magnitudes by their upper bits, once to collect. If more than 16,384 values
 * are about as large as the k-th, one or two more reads tell them apart.
 */
#include "kernels/level.h"

enum {
    CHUNK = 4096,        /* values between two changes of the floor */
    CANDIDATES = 16384,  /* values of the last bucket that are copied, not read again */
    MAX_RADIX_BITS = 16, /* a pass tells 2^16 parts of a bucket apart, and fewer of up to FEW values: to clear the */
    FEW_RADIX_BITS = 11, /* counters takes longer than to read a few values again */
    FEW = 1 << 18
};

#define NAN_MAGNITUDE 0x7f800001u

/* The magnitudes from `floor`, as bits, to `floor` + 2^`shift` - 1. */
struct bucket {
    uint32_t floor;
    unsigned shift;
    size_t above, members; /* values above the bucket: less than k; values in it: with those above at least k */
};

struct candidates {
    size_t count;
    uint32_t indices[CANDIDATES];
    float values[CANDIDATES];
};

/* Bits of floats of one sign order as the floats do. */
static uint32_t magnitude(float value)
{
    uint32_t bits = bits_of(value) & 0x7fffffffu;
    return bits < NAN_MAGNITUDE ? bits : NAN_MAGNITUDE;
}

/* Finds in a chunk the magnitudes from `floor` up to the end of the bucket. */
static size_t find(uint32_t *found, const float *chunk, size_t length, const struct bucket *bucket, uint32_t floor)
{
    uint32_t ceiling = bucket->floor + (1u << bucket->shift);
    return cl_level_current()->find(found, chunk, length, floor, ceiling > NAN_MAGNITUDE ? UINT32_MAX : ceiling);
}

/* One pass: the part of the bucket that holds the k-th largest magnitude. */
static struct bucket part_of(struct bucket bucket, const float *values, size_t count, size_t k)
{
    uint32_t counts[1 << MAX_RADIX_BITS], found[CHUNK], part = 0;
    unsigned bits = count > FEW ? MAX_RADIX_BITS : FEW_RADIX_BITS;
    unsigned shift = bits < bucket.shift ? bucket.shift - bits : 0;
    memset(counts, 0, sizeof *counts << (bucket.shift - shift));
    size_t counted = bucket.above; /* in `part` and above */
    for (size_t start = 0; start < count; start += CHUNK) {
        const float *chunk = values + start;
        size_t length = count - start < CHUNK ? count - start : CHUNK;
        size_t hits = find(found, chunk, length, &bucket, bucket.floor + (part << shift));
        for (size_t i = 0; i < hits; i++)
            counts[(magnitude(chunk[found[i]]) - bucket.floor) >> shift]++;
        for (counted += hits; counted - counts[part] >= k; part++)
            counted -= counts[part];
    }
    return (struct bucket){bucket.floor + (part << shift), shift, counted - counts[part], counts[part]};
}

/* The bucket with the k-th largest magnitude, narrowed until it has few members, is wanted whole, or is one value. */
static struct bucket bucket_of(const float *values, size_t count, size_t k, size_t few)
{
    struct bucket bucket = {.shift = 31, .members = count};
    while (bucket.shift > 0 && bucket.members > few && bucket.members > k - bucket.above)
        bucket = part_of(bucket, values, count, k);
    return bucket;
}

/* Takes the values above the bucket, and of those in it the first ones up to `k`. With `candidates`, those in it go
 * there. `chosen` may be `values`. */
static void collect(const struct bucket *bucket, const float *values, size_t count, size_t k, uint32_t *indices,
                    float *chosen, struct candidates *candidates)
{
    uint32_t found[CHUNK], ceiling = bucket->floor + (1u << bucket->shift);
    size_t taken = 0, ties = k - bucket->above;
    for (size_t start = 0; start < count; start += CHUNK) {
        const float *chunk = values + start;
        size_t length = count - start < CHUNK ? count - start : CHUNK;
        size_t hits = cl_level_current()->find(found, chunk, length, bucket->floor, UINT32_MAX);
        for (size_t i = 0; i < hits; i++) {
            float value = chunk[found[i]];
            uint32_t index = (uint32_t)start + found[i];
            if (magnitude(value) < ceiling) {
                if (candidates != NULL) {
                    candidates->indices[candidates->count] = index;
                    candidates->values[candidates->count++] = value;
                    continue;
                }
                if (ties == 0)
                    continue;
                ties--;
            }
            indices[taken] = index;
            chosen[taken++] = value;
        }
    }
}

/* Merges the best `right` candidates into the `left` values taken. */
static void merge(struct candidates *candidates, size_t left, size_t right, uint32_t *indices, float *chosen)
{
    uint32_t best[CANDIDATES];
    struct bucket bucket = bucket_of(candidates->values, candidates->count, right, 0);
    collect(&bucket, candidates->values, candidates->count, right, best, candidates->values, NULL);
    while (right > 0) {
        uint32_t index = candidates->indices[best[right - 1]];
        size_t at = left + right - 1;
        if (left > 0 && indices[left - 1] > index) {
            left--;
            indices[at] = indices[left];
            chosen[at] = chosen[left];
        } else {
            right--;
            indices[at] = index;
            chosen[at] = candidates->values[right];
        }
    }
}

int cl_select_largest(const float *values, uint64_t count, uint64_t k, uint32_t *indices, float *chosen)
{
    if (k > count || count > UINT32_MAX)
        return CL_EINVAL;
    if (k == 0)
        return CL_OK;
    struct bucket bucket = bucket_of(values, count, k, count > CANDIDATES ? CANDIDATES : 0);
    if (bucket.shift == 0 || bucket.members == k - bucket.above) {
        collect(&bucket, values, count, k, indices, chosen, NULL);
        return CL_OK;
    }
    struct candidates candidates;
    candidates.count = 0;
    collect(&bucket, values, count, k, indices, chosen, &candidates);
    merge(&candidates, bucket.above, k - bucket.above, indices, chosen);
    return CL_OK;
}
