#include "protocol/control.h"

#include "tests/check.h"

/* Each kind carries its fields where packet.h says, and they come back under their names. */
TEST(test_packets_carry_the_fields)
{
    struct cl_packet stop = {.kind = CL_PACKET_STOP}, abort = {.kind = CL_PACKET_ABORT};
    cl_control_write(&(struct cl_control){.group = 1, .sequence = 2, .index = 3, .first_packet = 3584}, &stop);
    CHECK(stop.group == 1 && stop.sequence == 2 && stop.index == 3 && stop.offset == 3584);
    struct cl_control read = cl_control_read(&stop);
    struct cl_message_id id = cl_control_id(&read);
    CHECK(id.group == 1 && id.sequence == 2 && id.index == 3 && read.first_packet == 3584);
    static const uint16_t CULPRITS[] = {0, 7, UINT16_MAX - 1, UINT16_MAX};
    for (size_t i = 0; i < sizeof CULPRITS / sizeof *CULPRITS; i++) {
        struct cl_control aborted = cl_control_abort(5, CL_EPEERLOST, CULPRITS[i]);
        cl_control_write(&aborted, &abort);
        CHECK_EQ(abort.index, CULPRITS[i] == UINT16_MAX ? 0 : CULPRITS[i] + 1);
        CHECK(abort.group == 5 && (int32_t)abort.offset == CL_EPEERLOST && abort.sequence == 0);
        read = cl_control_read(&abort);
        CHECK(read.group == 5 && read.reason == CL_EPEERLOST && read.culprit == CULPRITS[i]);
    }
}

/* Aborts of one group with different reasons or culprits, and STOPs of different parts, are different packets. */
TEST(test_every_field_counts)
{
    SCOPED(cl_controls_free) struct cl_controls controls = {0};
    struct cl_control aborts[] = {cl_control_abort(1, CL_EPEERLOST, 4), cl_control_abort(1, CL_ETIMEDOUT, 4),
                                  cl_control_abort(1, CL_EPEERLOST, 5)};
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 3; i++)
            CHECK(cl_controls_push(&controls, CL_PACKET_ABORT, &aborts[i]));
    CHECK_EQ(controls.count, 3);
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < 2; i++)
            CHECK(cl_controls_push(&controls, CL_PACKET_STOP, &(struct cl_control){.group = 1, .first_packet = i}));
    CHECK_EQ(controls.count, 5);
}

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
