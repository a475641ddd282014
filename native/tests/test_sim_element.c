/* The simulator's own arithmetic against the kernels': two independent ways to the same bits. */
#include <string.h>

#include "kernels/reduce.h"
#include "sim/element.h"
#include "tests/check.h"

enum { COUNT = 200, RANKS = 5, DTYPES = CL_U64 + 1 };

TEST(test_same_as_the_kernels)
{
    for (int d = 0; d < DTYPES; d++) {
        enum cl_dtype dtype = (enum cl_dtype)d;
        size_t size = cl_dtype_size(dtype);
        for (int o = CL_SUM; o <= CL_MAX; o++) {
            enum cl_op op = (enum cl_op)o;
            uint8_t reduced[8 * COUNT], next[8 * COUNT], expected[8 * COUNT];
            uint32_t divisor = op == CL_SUM ? RANKS : 1;
            for (uint32_t i = 0; i < COUNT; i++) {
                int64_t value = sim_element_value(dtype, op, RANKS, 0, 9, i);
                sim_element_write(dtype, reduced + i * size, value, 1);
                for (uint32_t rank = 1; rank < RANKS; rank++)
                    value = sim_element_reduce(dtype, op, value, sim_element_value(dtype, op, RANKS, rank, 9, i));
                sim_element_write(dtype, expected + i * size, value, divisor);
            }
            for (uint32_t rank = 1; rank < RANKS; rank++) {
                for (uint32_t i = 0; i < COUNT; i++)
                    sim_element_write(dtype, next + i * size, sim_element_value(dtype, op, RANKS, rank, 9, i), 1);
                cl_reduce_kernel(dtype, op)(reduced, next, COUNT);
            }
            cl_scale_kernel(dtype)(reduced, COUNT, divisor);
            CHECK(memcmp(reduced, expected, COUNT * size) == 0);
        }
    }
}

/* With as many ranks as there may be, sums of the narrowest floats are still exact. */
TEST(test_many_ranks_stay_exact)
{
    enum { MANY = 1024 };
    uint16_t sum = 0, next, expected;
    int64_t value = 0;
    for (uint32_t rank = 0; rank < MANY; rank++) {
        int64_t own = sim_element_value(CL_BF16, CL_SUM, MANY, rank, 3, 17);
        value += own;
        sim_element_write(CL_BF16, &next, own, 1);
        cl_reduce_kernel(CL_BF16, CL_SUM)(&sum, &next, 1);
    }
    sim_element_write(CL_BF16, &expected, value, 1);
    CHECK_EQ(sum, expected);
    CHECK(value >= -256 && value <= 256);
}

TEST(test_dtypes_by_size)
{
    for (uint32_t n = 0; n < 12; n++) {
        CHECK_EQ(cl_dtype_size(sim_element_dtype(1, n)), 1);
        CHECK_EQ(cl_dtype_size(sim_element_dtype(2, n)), 2);
        CHECK_EQ(cl_dtype_size(sim_element_dtype(4, n)), 4);
        CHECK_EQ(cl_dtype_size(sim_element_dtype(8, n)), 8);
    }
}
