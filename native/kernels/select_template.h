/*
 * The search of one level, included once by each level_<level>.c, which defines TARGET. It may define FIND_LANES and
 * find_lanes for its instructions: find_one for FIND_LANES values at once. A value is a hit if its magnitude, as bits,
 * exceeds `floor` by less than `width`.
 */

/* A signed comparison, with both sides less by 2^31: SSE2 has no other. */
TARGET static inline uint32_t is_hit(float value, uint32_t floor, uint32_t width)
{
    return (int32_t)((bits_of(value) & 0x7fffffffu) - (floor ^ 0x80000000u)) < (int32_t)(width ^ 0x80000000u);
}

/* Appends i to `found` if value i is a hit; returns how many it appended. */
TARGET static inline size_t find_one(uint32_t *found, const float *values, size_t i, uint32_t floor, uint32_t width)
{
    *found = (uint32_t)i;
    return is_hit(values[i], floor, width);
}

#ifndef FIND_LANES
#define FIND_LANES 16

TARGET static inline size_t find_lanes(uint32_t *found, const float *values, size_t i, uint32_t floor, uint32_t width)
{
    uint32_t any = 0;
    size_t hits = 0;
    /* gcc 12 makes vectors of this loop only if it does not unroll it. */
    _Pragma("GCC unroll 1") for (size_t j = 0; j < FIND_LANES; j++) any |= is_hit(values[i + j], floor, width);
    for (size_t j = 0; any != 0 && j < FIND_LANES; j++)
        hits += find_one(found + hits, values, i + j, floor, width);
    return hits;
}
#endif

TARGET static size_t find(uint32_t *found, const float *values, size_t count, uint32_t floor, uint32_t ceiling)
{
    size_t hits = 0, i = 0;
    for (; i + FIND_LANES <= count; i += FIND_LANES)
        hits += find_lanes(found + hits, values, i, floor, ceiling - floor);
    for (; i < count; i++)
        hits += find_one(found + hits, values, i, floor, ceiling - floor);
    return hits;
}
