/* Differences of arrays, on every instruction-set level, forwards and back; codes that nobody made. */
#include "kernels/difference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "commlayer.h"
#include "tests/check.h"

enum { MOST_VALUES = 3 * CL_DIFFERENCE_VALUES + 77, WIDEST = 8, MOST_BYTES = MOST_VALUES * WIDEST, GUARD = 16 };

static const char *const LEVELS[] = {"scalar", "avx2", "avx512"};
static const unsigned WIDTHS[] = {1, 2, 4, 8};

static uint8_t base[MOST_BYTES], values[MOST_BYTES], result[MOST_BYTES + GUARD];
static uint8_t code[MOST_BYTES + 4096], other[MOST_BYTES + 4096];

static uint64_t draw(void)
{
    return (uint64_t)random() << 42 ^ (uint64_t)random() << 21 ^ (uint64_t)random();
}

static double uniform(void)
{
    return ((double)random() + 0.5) / 2147483648.0;
}

/* Values of which a share changes: by 1, or by up to 2^bits. */
static void fill(size_t count, unsigned width, double share, double large, unsigned bits)
{
    for (size_t i = 0; i < count * width; i++)
        base[i] = (uint8_t)random();
    for (size_t i = 0; i < count; i++) {
        uint64_t value = 0, magnitude = uniform() < large ? draw() >> (64 - bits) : 1;
        memcpy(&value, base + i * width, width);
        if (uniform() < share)
            value += random() & 1 ? magnitude : 0 - magnitude;
        memcpy(values + i * width, &value, width);
    }
}

static int64_t check_both_ways(size_t count, unsigned width)
{
    int64_t length = cl_difference_encode(base, values, count, width, code, sizeof code);
    CHECK(length >= 0);
    size_t blocks = (count + CL_DIFFERENCE_VALUES - 1) / CL_DIFFERENCE_VALUES;
    CHECK((size_t)length <= count * width + 2 * blocks);
    for (size_t level = 0; level < sizeof LEVELS / sizeof *LEVELS; level++) {
        if (cl_kernels_select(LEVELS[level]) != CL_OK)
            continue;
        memset(other, 0xee, sizeof other);
        CHECK_EQ(cl_difference_encode(base, values, count, width, other, sizeof other), length);
        CHECK(memcmp(code, other, (size_t)length) == 0);
    }
    memset(result, 0xee, sizeof result);
    memcpy(result, base, count * width);
    CHECK_EQ(cl_difference_apply(result, count, width, code, (uint64_t)length, 0), CL_OK);
    CHECK(memcmp(result, values, count * width) == 0);
    CHECK_EQ(cl_difference_apply(result, count, width, code, (uint64_t)length, 1), CL_OK);
    CHECK(memcmp(result, base, count * width) == 0);
    CHECK(result[count * width] == 0xee);
    return length;
}

TEST(test_every_share_and_width_comes_back)
{
    static const size_t COUNTS[] = {0,
                                    1,
                                    2,
                                    63,
                                    64,
                                    65,
                                    130,
                                    1000,
                                    CL_DIFFERENCE_VALUES - 1,
                                    CL_DIFFERENCE_VALUES,
                                    CL_DIFFERENCE_VALUES + 1,
                                    MOST_VALUES};
    static const double SHARES[] = {0, 0.0001, 0.01, 0.034, 0.3, 0.7, 1};
    srandom(7);
    for (size_t w = 0; w < sizeof WIDTHS / sizeof *WIDTHS; w++)
        for (size_t c = 0; c < sizeof COUNTS / sizeof *COUNTS; c++)
            for (size_t s = 0; s < sizeof SHARES / sizeof *SHARES; s++) {
                unsigned bits = 1 + (unsigned)random() % (8 * WIDTHS[w]);
                fill(COUNTS[c], WIDTHS[w], SHARES[s], uniform(), bits);
                check_both_ways(COUNTS[c], WIDTHS[w]);
            }
}

TEST(test_extreme_changes_come_back)
{
    for (size_t w = 0; w < sizeof WIDTHS / sizeof *WIDTHS; w++) {
        unsigned width = WIDTHS[w];
        memset(base, 0, sizeof base);
        memset(values, 0, sizeof values);
        values[width - 1] = 0x80;                                /* the most negative number */
        memset(values + 2 * width, 0xff, width);                 /* -1 */
        memset(base + 3 * width, 0xff, width);                   /* 1, over the end */
        memset(values + (MOST_VALUES - 1) * width, 0x7f, width); /* after the longest gap */
        check_both_ways(MOST_VALUES, width);
    }
}

/* One long gap among short ones: its zeros fill many words. */
TEST(test_a_gap_beyond_all_others_comes_back)
{
    memset(base, 0, sizeof base);
    memset(values, 0, sizeof values);
    for (size_t i = 0; i < CL_DIFFERENCE_VALUES; i++)
        values[2 * i] = i < 20000 || i == CL_DIFFERENCE_VALUES - 1;
    check_both_ways(CL_DIFFERENCE_VALUES, 2);
    for (size_t i = 0; i < CL_DIFFERENCE_VALUES; i++)
        values[2 * i] = (uint8_t)(2 + (i > 20000 && i < CL_DIFFERENCE_VALUES - 1)); /* and of runs */
    check_both_ways(CL_DIFFERENCE_VALUES, 2);
}

/* 1.33 % of changes, 89 % of them by one: the mean of bits is within a few percent of the entropy. */
TEST(test_length_is_near_the_entropy)
{
    double p = 0.0133, sum = 0;
    srandom(11);
    for (int round = 0; round < 20; round++) {
        fill(3 * CL_DIFFERENCE_VALUES, 2, p, 0.11, 2);
        sum += (double)check_both_ways(3 * CL_DIFFERENCE_VALUES, 2);
    }
    /* `fill` makes magnitudes of 0 to 3 of these 11 %, so 2.75 % of them are no change. */
    double changed = p * (1 - 0.0275), one = (0.89 + 0.0275) / 0.9725, rest = (1 - one) / 2;
    double entropy = -changed * log2(changed) - (1 - changed) * log2(1 - changed) +
                     changed * (1 - one * log2(one) - 2 * rest * log2(rest));
    double bits = sum * 8 / (20.0 * 3 * CL_DIFFERENCE_VALUES);
    CHECK(bits < 1.06 * entropy && bits > 0.97 * entropy);
}

TEST(test_a_code_never_leaves_its_room)
{
    srandom(13);
    for (int round = 0; round < 200; round++) {
        size_t count = 1 + (size_t)random() % 3000;
        unsigned width = WIDTHS[random() % 4];
        fill(count, width, uniform(), uniform(), 1 + (unsigned)random() % (8 * width));
        uint64_t room = (uint64_t)random() % (count * width + 100);
        uint8_t *tight = malloc(room + 1); /* ASan watches its end */
        int64_t length = cl_difference_encode(base, values, count, width, tight, room);
        CHECK(length == CL_EAGAIN || (length >= 0 && (uint64_t)length <= room));
        free(tight);
    }
    CHECK_EQ(cl_difference_encode(base, values, 3, 3, code, sizeof code), CL_EINVAL);
    CHECK_EQ(cl_difference_apply(result, 3, 16, code, 2, 0), CL_EINVAL);
}

/* Applies a copy that ends where its memory does, to values that end where theirs does. */
static int apply_exactly(const uint8_t *bytes, size_t length, size_t count, unsigned width)
{
    uint8_t *copy = malloc(length + 1), *target = calloc(count + 1, width);
    memcpy(copy + 1, bytes, length);
    int status = cl_difference_apply(target + width, count, width, copy + 1, length, (int32_t)(random() & 1));
    free(copy);
    free(target);
    return status;
}

TEST(test_hostile_codes_are_safe)
{
    size_t refused = 0, rounds = 30000;
    srandom(17);
    for (size_t round = 0; round < rounds; round++) {
        size_t count = 1 + (size_t)random() % 400, length;
        unsigned width = WIDTHS[random() % 4];
        if (random() % 4 == 0) {
            length = (size_t)random() % 200;
            for (size_t i = 0; i < length; i++)
                code[i] = (uint8_t)random();
            if (length > 2 && random() % 2)
                code[1] = 0;
        } else {
            fill(count, width, uniform() * uniform(), uniform(), 1 + (unsigned)random() % (8 * width));
            length = (size_t)cl_difference_encode(base, values, count, width, code, sizeof code);
            for (long left = random() % 5; left > 0; left--)
                code[(size_t)random() % length] ^= (uint8_t)(1u << random() % 8);
            length -= random() % 2 ? (size_t)random() % length : 0;
        }
        refused += apply_exactly(code, length, count, width) != CL_OK;
    }
    CHECK(refused > rounds / 4 && refused < rounds);
}

TEST(test_a_cut_or_longer_code_is_refused)
{
    srandom(19);
    fill(1000, 2, 0.1, 0.3, 9);
    int64_t length = cl_difference_encode(base, values, 1000, 2, code, sizeof code);
    for (int64_t cut = 0; cut < length; cut++)
        CHECK_EQ(apply_exactly(code, (size_t)cut, 1000, 2), CL_EINVAL);
    CHECK_EQ(apply_exactly(code, (size_t)length, 1000, 2), CL_OK);
    CHECK_EQ(apply_exactly(code, (size_t)length + 1, 1000, 2), CL_EINVAL);
}
