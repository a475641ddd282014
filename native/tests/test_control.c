#include "protocol/control.h"

#include "tests/check.h"

TEST(test_fifo_without_duplicates)
{
    SCOPED(cl_controls_free) struct cl_controls controls = {0};
    struct cl_control_entry entry;
    CHECK(!cl_controls_pop(&controls, &entry));
    for (int round = 0; round < 3; round++)
        for (uint32_t i = 0; i < 20; i++) {
            struct cl_control control = {.group = i};
            CHECK(cl_controls_push(&controls, 3, &control));
        }
    CHECK(cl_controls_push(&controls, 4, &(struct cl_control){.group = 0})); /* another kind is another thing */
    CHECK_EQ(controls.count, 21);
    for (uint32_t i = 0; i < 20; i++)
        CHECK(cl_controls_pop(&controls, &entry) && entry.kind == 3 && entry.control.group == i);
    CHECK(cl_controls_pop(&controls, &entry) && entry.kind == 4);
    CHECK(!cl_controls_pop(&controls, &entry));
}
