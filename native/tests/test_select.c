/* The selection of the largest magnitudes, on every instruction-set level, against a sort. */
#include "kernels/level.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check.h"

enum { MOST = 300000, GUARD = 16 };

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};

static float values[MOST], chosen[MOST + GUARD];
static uint32_t order[MOST], indices[MOST + GUARD], expected[MOST];

/* NaN counts as larger than infinity, and every NaN as the same. */
static double magnitude_at(uint32_t index)
{
    double magnitude = fabs((double)values[index]);
    return isnan(magnitude) ? 1e302 : isinf(magnitude) ? 1e301 : magnitude;
}

static int by_magnitude(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    double difference = magnitude_at(b) - magnitude_at(a);
    return difference != 0 ? (difference > 0) - (difference < 0) : (a > b) - (a < b);
}

static int by_index(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* Checks the selection of the first k of `order`. */
static void check_first(size_t count, size_t k)
{
    memcpy(expected, order, k * sizeof *order);
    qsort(expected, k, sizeof *expected, by_index);
    for (size_t level = 0; level < sizeof LEVELS / sizeof *LEVELS; level++) {
        if (cl_kernels_select(LEVELS[level]) != CL_OK)
            continue;
        memset(indices, 0xee, sizeof indices);
        memset(chosen, 0xee, sizeof chosen);
        CHECK(cl_select_largest(values, count, k, indices, chosen) == CL_OK);
        CHECK(memcmp(indices, expected, k * sizeof *expected) == 0);
        size_t wrong = 0;
        for (size_t i = 0; i < k; i++)
            wrong += memcmp(&chosen[i], &values[expected[i]], sizeof *chosen) != 0;
        CHECK_EQ(wrong, 0);
        CHECK(indices[k] == 0xeeeeeeee && bits_of(chosen[k]) == 0xeeeeeeee);
    }
}

static void check_shares(size_t count)
{
    const size_t shares[] = {0, 1, 2, count / 1000, count / 100, count / 10, count / 2, count - 1, count};
    for (size_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    qsort(order, count, sizeof *order, by_magnitude);
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (shares[i] <= count)
            check_first(count, shares[i]);
}

/* Checks counts below and above the sizes at which the search or the selection changes its way. */
static void check_counts(float (*draw)(size_t index))
{
    static const size_t COUNTS[] = {1, 2, 15, 16, 17, 33, 4095, 4096, 4099, 16384, 16385, 50001, MOST};
    srandom(42);
    for (size_t i = 0; i < MOST; i++)
        values[i] = draw(i);
    for (size_t i = 0; i < sizeof COUNTS / sizeof *COUNTS; i++)
        check_shares(COUNTS[i]);
}

static double uniform(void)
{
    return ((double)random() + 0.5) / 2147483648.0;
}

static float gaussian(size_t index)
{
    (void)index;
    return (float)(sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()));
}

static float signed_randomly(float value)
{
    return random() & 1 ? -value : value;
}

TEST(test_random_values)
{
    check_counts(gaussian);
}

static float ascending(size_t index)
{
    return (float)index;
}

TEST(test_ascending_values)
{
    check_counts(ascending);
}

static float zero(size_t index)
{
    (void)index;
    return signed_randomly(0);
}

static float one(size_t index)
{
    (void)index;
    return signed_randomly(1);
}

static float one_of_three(size_t index)
{
    (void)index;
    return signed_randomly((float)(random() % 3));
}

static float rarely_not_zero(size_t index)
{
    return index % 200 == 77 ? gaussian(index) : 0;
}

TEST(test_ties_go_to_the_lowest_indices)
{
    check_counts(zero);
    check_counts(one);
    check_counts(one_of_three);
    check_counts(rarely_not_zero);
}

/* Values so close that they differ in the lowest 14 bits only. */
static float close_to_one(size_t index)
{
    (void)index;
    return signed_randomly(1 + ldexpf((float)(random() % 16384), -23));
}

static float denormal(size_t index)
{
    return ldexpf(gaussian(index), -137);
}

TEST(test_close_and_denormal_values)
{
    check_counts(close_to_one);
    check_counts(denormal);
}

/* A twelfth each of infinities and of NaNs with different payloads. */
static float not_always_finite(size_t index)
{
    switch (random() % 12) {
    case 0:
        return signed_randomly(INFINITY);
    case 1:
        return signed_randomly(float_of(0x7f800001u + (uint32_t)random() % 0x7fffff));
    default:
        return gaussian(index);
    }
}

TEST(test_nan_is_largest_then_infinity)
{
    check_counts(not_always_finite);
}

TEST(test_nothing_is_selected_of_nothing)
{
    indices[0] = 7;
    CHECK(cl_select_largest(values, 0, 0, indices, chosen) == CL_OK);
    CHECK(cl_select_largest(values, 3, 4, indices, chosen) == CL_EINVAL);
    CHECK(cl_select_largest(values, UINT64_C(1) << 32, 1, indices, chosen) == CL_EINVAL);
    CHECK_EQ(indices[0], 7);
}
