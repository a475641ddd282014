/* Operations of packets: which of them the submitting thread sends itself. */
#include "engine/packet_wait.h"
#include "tests/watched_wire.h"

/* The same words as messages without a sum, all from the same place. */
static cl_plan *draft_messages(uint32_t rank, uint32_t messages, uint32_t bytes)
{
    struct draft draft = {.rank = rank, .world_size = 2, .input_bytes = 4 * WORDS, .output_bytes = 4 * WORDS};
    for (uint32_t i = 0; i < messages; i++) {
        struct cl_step step = {.kind = CL_SEND, .peer = 1 - rank, .message = i, .length = bytes};
        draft_add(&draft, step, DRAFT_NONE);
        step.kind = CL_RECV_COPY;
        step.target = CL_OUTPUT;
        draft_add(&draft, step, DRAFT_NONE);
    }
    return draft_finish(&draft);
}

/* In a call that waits for the end, the submitting thread is not to poll, and to send by that. */
static void leave_polling(const struct world *world, uint32_t rank)
{
    atomic_store(&world->engines[rank]->packet_wait->closed, true);
}

/* A short collective leaves in the thread that submits it, whether it then waits or not; not amid others, nor one of
 * many messages or bytes. */
TEST(test_short_collectives)
{
    enum { ALONE, WITHIN_THE_CALL, AMID_OTHERS, MANY_MESSAGES, MANY_BYTES, WAYS, ROUNDS = 20, MOST = 2000 };
    static const struct {
        uint32_t messages, bytes;
    } PLANS[WAYS] = {[MANY_MESSAGES] = {9, 4}, [MANY_BYTES] = {6, 12000}};
    for (uint32_t way = 0; way < WAYS; way++) {
        SCOPED_WORLD world = open_world(2, "udp", 0);
        SCOPED_TEAM team = open_team(&world, 1, false);
        bool leaves = way == ALONE || way == WITHIN_THE_CALL;
        uint32_t sends = 0;
        watch(&world, 0);
        for (uint32_t rank = 0; PLANS[way].messages > 0 && rank < 2; rank++) {
            cl_plan_release(team.plans[rank]);
            team.plans[rank] = draft_messages(rank, PLANS[way].messages, PLANS[way].bytes);
            CHECK(team.plans[rank] != NULL);
        }
        /* The engine's thread may be faster: on a busy machine in nearly every round. */
        for (uint32_t round = 0; round < ROUNDS || (leaves && sends == 0 && round < MOST); round++) {
            uint8_t in = 0, out = 1;
            cl_operation *other = NULL, *operations[2] = {NULL, NULL};
            struct call *calls[2] = {make_call(0, round), make_call(1, round)};
            if (way == AMID_OTHERS)
                other = start_receive(&team, 0, 1, 1, &in, 1, PATIENCE_US);
            if (way == WITHIN_THE_CALL)
                CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
            leave_polling(&world, 0);
            uint32_t before = own_sends;
            if (way == WITHIN_THE_CALL)
                CHECK_EQ(run_call(&team, 0, calls[0], PATIENCE_US), CL_OK);
            else
                CHECK_EQ(submit_call(&team, 0, calls[0], PATIENCE_US, &operations[0]), CL_OK);
            sends += own_sends - before;
            if (way != WITHIN_THE_CALL)
                CHECK_EQ(submit_call(&team, 1, calls[1], PATIENCE_US, &operations[1]), CL_OK);
            for (uint32_t rank = 0; rank < 2; rank++) {
                if (operations[rank] != NULL)
                    CHECK_EQ(finish(operations[rank]), CL_OK);
                if (PLANS[way].messages == 0)
                    check_call(calls[rank], 2, round);
            }
            for (uint32_t rank = 0; rank < 2; rank++)
                free(calls[rank]);
            if (way == AMID_OTHERS) {
                CHECK_EQ(finish(start_send(&team, 1, 0, 1, &out, 1, PATIENCE_US)), CL_OK);
                CHECK_EQ(finish(other), CL_OK);
            }
        }
        CHECK_EQ(sends > 0, leaves);
    }
}
