#include "congestion/cc.h"

#include <stddef.h>

#include "tests/check.h"

enum { BYTES = 1472 };

static void test_names(void)
{
    CHECK(cl_cc_find("delay") == &cl_cc_type_delay);
    CHECK(cl_cc_find("fixed") == &cl_cc_type_fixed);
    CHECK(!cl_cc_find("cubic"));
    CHECK(!cl_cc_find(NULL));
}

static void test_fixed(void)
{
    struct cl_cc cc;
    cl_cc_init(&cc, &cl_cc_type_fixed, BYTES, 25000000);
    CHECK_EQ(cc.rate, 25000000);
    CHECK_EQ(cc.window, 5000000); /* 200 ms of it */
    cc.type->on_lost(&cc, 1000);
    cc.type->on_pto(&cc, 10);
    CHECK_EQ(cc.rate, 25000000);
    CHECK_EQ(cc.window, 5000000);
    cl_cc_init(&cc, &cl_cc_type_fixed, BYTES, 1000);
    CHECK_EQ(cc.window, 32 * BYTES);
}

int main(void)
{
    RUN(test_names);
    RUN(test_fixed);
    return CHECK_REPORT();
}
