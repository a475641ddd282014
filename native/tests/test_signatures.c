#include "protocol/signatures.h"

#include "tests/check.h"

TEST(test_in_flight_only)
{
    SCOPED(cl_signatures_free) struct cl_signatures signatures = {0};
    CHECK_EQ(cl_signatures_find(&signatures, 1, 7), 0);
    CHECK(cl_signatures_add(&signatures, 1, 7, 100));
    CHECK(cl_signatures_add(&signatures, 2, 7, 200));
    CHECK(cl_signatures_add(&signatures, 1, 8, 0));
    CHECK_EQ(cl_signatures_find(&signatures, 1, 7), 100);
    CHECK_EQ(cl_signatures_find(&signatures, 2, 7), 200);
    cl_signatures_remove(&signatures, 1, 7);
    cl_signatures_remove(&signatures, 3, 7); /* never began */
    CHECK_EQ(cl_signatures_find(&signatures, 1, 7), 0);
    CHECK_EQ(cl_signatures_find(&signatures, 2, 7), 200);
    CHECK_EQ(signatures.operations.count, 2);
}

TEST(test_oldest)
{
    SCOPED(cl_signatures_free) struct cl_signatures signatures = {0};
    CHECK_EQ(cl_signatures_oldest(&signatures, 1), UINT32_MAX);
    CHECK(cl_signatures_add(&signatures, 1, 9, 0));
    CHECK(cl_signatures_add(&signatures, 1, 8, 0)); /* delayed, and begun */
    CHECK(cl_signatures_add(&signatures, 1, 8, 3));
    CHECK(cl_signatures_add(&signatures, 2, 7, 0));
    CHECK_EQ(cl_signatures_oldest(&signatures, 1), 8);
    CHECK_EQ(cl_signatures_find(&signatures, 1, 8), 3);
    cl_signatures_remove(&signatures, 1, 8);
    CHECK_EQ(cl_signatures_oldest(&signatures, 1), 8);
    cl_signatures_remove(&signatures, 1, 8);
    CHECK_EQ(cl_signatures_oldest(&signatures, 1), 9);
}

TEST(test_turns)
{
    SCOPED(cl_signatures_free) struct cl_signatures signatures = {0};
    CHECK_EQ(cl_signatures_next(&signatures).signature, 0);
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 3; i++)
        CHECK(cl_signatures_add(&signatures, 5, i, (uint16_t)(1 << i)));
    for (uint32_t i = 0; i < 3; i++)
        sum += cl_signatures_next(&signatures).signature;
    CHECK_EQ(sum, 7);
}

TEST(test_many)
{
    SCOPED(cl_signatures_free) struct cl_signatures signatures = {0};
    for (uint32_t i = 0; i < 1000; i++)
        CHECK(cl_signatures_add(&signatures, 5, i, (uint16_t)(i + 1)));
    for (uint32_t i = 0; i < 1000; i += 2)
        cl_signatures_remove(&signatures, 5, i);
    CHECK_EQ(signatures.operations.count, 500);
    for (uint32_t i = 0; i < 1000; i++)
        CHECK_EQ(cl_signatures_find(&signatures, 5, i), i % 2 ? i + 1 : 0);
}

TEST(test_unsigned_agrees_with_all)
{
    CHECK(cl_signatures_differ(3, 4));
    CHECK(!cl_signatures_differ(3, 3));
    CHECK(!cl_signatures_differ(0, 4));
    CHECK(!cl_signatures_differ(3, 0));
}
