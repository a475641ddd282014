/*
 * Where two arrays differ, for one level: included once by each level_<level>.c, which defines TARGET. It may define
 * HAS_UNEQUAL and unequal_1, unequal_2, unequal_4 and unequal_8 for its instructions: a bit for each of 64 values, of
 * the bytes in their names, that is 1 where the values differ.
 */

enum { UNEQUAL_VALUES = 64 };

#ifndef HAS_UNEQUAL
/* Bit i of the result is byte i, which is 0 or 1. */
TARGET static inline uint64_t bits_of_bytes(const uint8_t bytes[UNEQUAL_VALUES])
{
    uint64_t bits = 0;
    for (size_t i = 0; i < UNEQUAL_VALUES / 8; i++) {
        uint64_t eight = 0;
        for (size_t j = 0; j < 8; j++)
            eight |= (uint64_t)bytes[8 * i + j] << 8 * j;
        bits |= (eight * 0x0102040810204080u >> 56) << 8 * i;
    }
    return bits;
}

#define UNEQUAL(width, type)                                                                                           \
    TARGET static inline uint64_t unequal_##width(const uint8_t *left, const uint8_t *right)                           \
    {                                                                                                                  \
        type a[UNEQUAL_VALUES], b[UNEQUAL_VALUES];                                                                     \
        uint8_t bytes[UNEQUAL_VALUES];                                                                                 \
        memcpy(a, left, sizeof a);                                                                                     \
        memcpy(b, right, sizeof b);                                                                                    \
        for (size_t i = 0; i < UNEQUAL_VALUES; i++)                                                                    \
            bytes[i] = a[i] != b[i];                                                                                   \
        return bits_of_bytes(bytes);                                                                                   \
    }
UNEQUAL(1, uint8_t)
UNEQUAL(2, uint16_t)
UNEQUAL(4, uint32_t)
UNEQUAL(8, uint64_t)
#undef UNEQUAL
#endif

/* Appends the places of the ones of `bits`, from `first` on. Two at a time, wanted or not: most groups of 64 values
 * have a few, and a branch for each would be foretold badly. */
TARGET static inline size_t append_places(uint16_t *places, size_t count, uint64_t bits, size_t first)
{
    size_t found = (size_t)__builtin_popcountll(bits);
    for (size_t i = 0; i < found; i += 2) {
        places[count + i] = (uint16_t)(first + (size_t)__builtin_ctzll(bits));
        bits &= bits - 1;
        places[count + i + 1] = (uint16_t)(first + (size_t)__builtin_ctzll(bits | 1ull << 63));
        bits &= bits - 1;
    }
    return count + found;
}

#define CHANGED(width, type)                                                                                           \
    TARGET static size_t changed_##width(uint16_t *places, const uint8_t *left, const uint8_t *right, size_t count)    \
    {                                                                                                                  \
        size_t found = 0, i = 0;                                                                                       \
        for (; i + UNEQUAL_VALUES <= count; i += UNEQUAL_VALUES)                                                       \
            found = append_places(places, found, unequal_##width(left + i * width, right + i * width), i);             \
        for (; i < count; i++) {                                                                                       \
            places[found] = (uint16_t)i;                                                                               \
            found += memcmp(left + i * width, right + i * width, width) != 0;                                          \
        }                                                                                                              \
        return found;                                                                                                  \
    }
CHANGED(1, uint8_t)
CHANGED(2, uint16_t)
CHANGED(4, uint32_t)
CHANGED(8, uint64_t)
#undef CHANGED

TARGET static size_t changed(uint16_t *places, const void *left, const void *right, size_t count, unsigned value_bytes)
{
    switch (value_bytes) {
    case 1:
        return changed_1(places, left, right, count);
    case 2:
        return changed_2(places, left, right, count);
    case 4:
        return changed_4(places, left, right, count);
    default:
        return changed_8(places, left, right, count);
    }
}
