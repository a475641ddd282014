/* cl_plan_create accepts exactly the plans that can run. */
#include "plan/plan.h"
#include "sim/scarcity.h"
#include "tests/check.h"
#include "tests/draft.h"

#include <stdbool.h>
#include <string.h>

/* COPY -> SEND, RECV_REDUCE -> SCALE -> POST -> AWAIT -> REDUCE from staging: one of nearly each kind. */
static struct draft sound(void)
{
    struct draft draft = {
        .rank = 1, .world_size = 3, .input_bytes = 64, .output_bytes = 128, .scratch_bytes = 32, .staging_bytes = 16};
    uint32_t copy =
        draft_add(&draft, (struct cl_step){.kind = CL_COPY, .peer = 1, .target = CL_SCRATCH, .length = 32}, DRAFT_NONE);
    draft_add(&draft, (struct cl_step){.kind = CL_SEND, .peer = 2, .source = CL_SCRATCH, .length = 32}, copy);
    uint32_t receive = draft_add(
        &draft,
        (struct cl_step){.kind = CL_RECV_REDUCE, .peer = 0, .target = CL_OUTPUT, .target_offset = 64, .length = 64},
        DRAFT_NONE);
    uint32_t scale = draft_add(
        &draft, (struct cl_step){.kind = CL_SCALE, .peer = 3, .target = CL_OUTPUT, .target_offset = 64, .length = 64},
        receive);
    draft_order(&draft, copy, scale);
    uint32_t post = draft_add(&draft, (struct cl_step){.kind = CL_POST, .peer = 1, .message = 1}, scale);
    uint32_t wait = draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = 0, .message = 1}, post);
    draft_add(
        &draft,
        (struct cl_step){
            .kind = CL_REDUCE, .peer = 0, .source = CL_STAGING, .source_offset = 8, .target = CL_OUTPUT, .length = 8},
        wait);
    draft_lay_out(&draft);
    return draft;
}

static int create(const struct draft *draft)
{
    cl_plan *plan = NULL;
    int status = draft_create(draft, &plan);
    if (status == CL_OK)
        cl_plan_release(plan);
    else
        CHECK(plan == NULL);
    return status;
}

TEST(test_a_sound_plan)
{
    struct draft draft = sound();
    cl_plan *plan;
    CHECK_EQ(draft_create(&draft, &plan), CL_OK);
    memset(draft.steps, 0xFF, sizeof draft.steps); /* the plan has its own copy */
    memset(draft.successors, 0xFF, sizeof draft.successors);
    CHECK_EQ(plan->step_count, 7);
    CHECK_EQ(plan->network_steps, 2);
    CHECK_EQ(plan->posts, 1);
    CHECK(plan->uses_host);
    CHECK_EQ(plan->root_count, 2);
    CHECK_EQ(plan->roots[0], 0);
    CHECK_EQ(plan->roots[1], 2);
    CHECK_EQ(plan->steps[3].dependencies, 2);
    CHECK_EQ(plan->host_rank_count, 1);
    CHECK_EQ(plan->host_ranks[0], 0);
    cl_plan_retain(plan);
    cl_plan_release(plan);
    CHECK_EQ(plan->steps[3].peer, 3);
    cl_plan_release(plan);
    cl_plan_release(NULL);
}

TEST(test_an_empty_plan)
{
    cl_plan *plan;
    CHECK_EQ(cl_plan_create(&(struct cl_plan_options){.world_size = 1}, &plan), CL_OK);
    CHECK(!plan->uses_host);
    CHECK_EQ(plan->root_count, 0);
    cl_plan_release(plan);
}

TEST(test_arguments)
{
    struct draft draft = sound();
    cl_plan *plan;
    struct cl_plan_options options = {.steps = draft.steps, .step_count = 1, .world_size = 1};
    CHECK_EQ(cl_plan_create(&options, NULL), CL_EINVAL);
    options.steps = NULL;
    CHECK_EQ(cl_plan_create(&options, &plan), CL_EINVAL);
    options = (struct cl_plan_options){.successor_count = 1, .world_size = 1};
    CHECK_EQ(cl_plan_create(&options, &plan), CL_EINVAL);
    draft.rank = draft.world_size;
    CHECK_EQ(create(&draft), CL_EINVAL);
}

/* Applies one change to step `step` of the plan that `made` drafts, and expects it to be refused. */
#define REFUSED_OF(made, step, change)                                                                                 \
    do {                                                                                                               \
        struct draft spoilt = made();                                                                                  \
        struct cl_step *s = &spoilt.steps[step];                                                                       \
        s->change;                                                                                                     \
        CHECK_EQ(create(&spoilt), CL_EINVAL);                                                                          \
    } while (0)
#define REFUSED(step, change) REFUSED_OF(sound, step, change)

TEST(test_each_field)
{
    CHECK_EQ(create(&(struct draft){.rank = 0, .world_size = 1}), CL_OK);
    REFUSED(0, kind = CL_CHECK + 1);
    REFUSED(0, source = CL_STAGING + 1);
    REFUSED(0, target = CL_STAGING + 1);
    REFUSED(0, peer = 3);
    REFUSED(1, peer = 1); /* a message to oneself */
    REFUSED(1, length = (uint64_t)UINT32_MAX + 1);
    REFUSED(1, source = CL_STAGING);
    REFUSED(2, target = CL_STAGING);
    REFUSED(2, peer = UINT32_MAX);
    REFUSED(3, peer = 0); /* a division by zero */
    REFUSED(4, message = 0);
    REFUSED(4, message = CL_POSTS_LIMIT + 1);
    REFUSED(5, peer = 3);
    REFUSED(0, flags = CL_STEP_PARTIAL); /* no packets to lose */
    REFUSED(1, flags = CL_STEP_KEEP);    /* without a codec there is no error to keep */
    REFUSED(1, flags = 4);
    struct draft draft = sound();
    draft.steps[1].flags = CL_STEP_PARTIAL;
    draft.steps[3] = (struct cl_step){.kind = CL_SCALE, .peer = 3, .target = CL_STAGING, .dependencies = 2};
    draft.steps[3].successor_first = draft.steps[2].successor_first + 1;
    draft.steps[3].successor_count = 1;
    CHECK_EQ(create(&draft), CL_EINVAL); /* whose staging? `peer` is the divisor */
    draft.steps[3].target = CL_OUTPUT;
    CHECK_EQ(create(&draft), CL_OK);
}

/* A number that one rank of a host tells and another checks. */
TEST(test_numbers)
{
    struct cl_step told = {.kind = CL_TELL, .peer = 1, .source_offset = UINT64_MAX, .target_offset = 24};
    struct cl_step checked = {.kind = CL_CHECK, .peer = 2, .source_offset = 24, .target_offset = UINT64_MAX};
    const struct {
        struct cl_step step;
        uint64_t staging_bytes;
        int status;
    } cases[] = {
        {told, 32, CL_OK},
        {checked, 32, CL_OK},
        {told, 31, CL_EINVAL},
        {checked, 31, CL_EINVAL},
        {{.kind = CL_TELL, .peer = 2}, 32, CL_EINVAL},  /* it writes to its own staging alone */
        {{.kind = CL_CHECK, .peer = 3}, 32, CL_EINVAL}, /* there is no such rank */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cl_plan *plan = NULL;
        struct cl_plan_options options = {.steps = &cases[i].step,
                                          .step_count = 1,
                                          .rank = 1,
                                          .world_size = 3,
                                          .staging_bytes = cases[i].staging_bytes};
        CHECK_EQ(cl_plan_create(&options, &plan), cases[i].status);
        if (plan == NULL)
            continue;
        CHECK(plan->uses_host);
        CHECK_EQ(plan->host_rank_count, 1);
        CHECK_EQ(plan->host_ranks[0], cases[i].step.peer);
        cl_plan_release(plan);
    }
}

/* Encodes 100 values, sends them, receives as many, and decodes the own ones. */
static struct draft encoded(void)
{
    enum { INT8 = (CL_CODEC_INT8 + 1) << 8 };
    struct draft draft = {.world_size = 2, .input_bytes = 400, .output_bytes = 400, .scratch_bytes = 132};
    struct cl_step step = {.kind = CL_ENCODE, .flags = INT8 | CL_STEP_KEEP, .target = CL_SCRATCH, .length = 400};
    step.factor = 1;
    uint32_t done = draft_add(&draft, step, DRAFT_NONE);
    step = (struct cl_step){.kind = CL_SEND, .flags = INT8 | CL_STEP_KEEP | CL_STEP_PARTIAL, .peer = 1};
    step.source = CL_SCRATCH;
    step.length = 400;
    draft_add(&draft, step, done);
    step = (struct cl_step){.kind = CL_RECV_REDUCE, .flags = INT8, .peer = 1, .target = CL_OUTPUT, .length = 400};
    draft_add(&draft, step, DRAFT_NONE);
    step = (struct cl_step){.kind = CL_COPY, .flags = INT8, .source = CL_SCRATCH, .target = CL_OUTPUT, .length = 400};
    draft_add(&draft, step, done);
    draft_lay_out(&draft);
    return draft;
}

#define REFUSED_ENCODED(step, change) REFUSED_OF(encoded, step, change)

TEST(test_codecs)
{
    struct draft draft = encoded();
    CHECK_EQ(create(&draft), CL_OK);
    draft.scratch_bytes = 131; /* two blocks are 132 bytes */
    CHECK_EQ(create(&draft), CL_EINVAL);
    REFUSED_ENCODED(0, flags = (CL_CODECS + 1) << 8);
    REFUSED_ENCODED(0, flags = 0);
    REFUSED_ENCODED(0, target = CL_OUTPUT);
    REFUSED_ENCODED(0, source = CL_STAGING);
    REFUSED_ENCODED(0, target_offset = 1);
    REFUSED_ENCODED(0, length = 398);
    REFUSED_ENCODED(0, factor = 0);
    REFUSED_ENCODED(0, source_offset = 4);
    REFUSED_ENCODED(1, source = CL_INPUT);
    REFUSED_ENCODED(1, source_offset = 1);
    REFUSED_ENCODED(1, target_offset = 4);
    REFUSED_ENCODED(2, flags |= CL_STEP_KEEP);
    REFUSED_ENCODED(2, target_offset = 4);
    REFUSED_ENCODED(2, length = 3);
    REFUSED_ENCODED(3, source = CL_INPUT);
    REFUSED_ENCODED(3, target = CL_STAGING);
    REFUSED_ENCODED(3, target_offset = 4);
    REFUSED_ENCODED(3, flags |= CL_STEP_PARTIAL);
    REFUSED_ENCODED(3, kind = CL_REDUCE);
}

TEST(test_ranges)
{
    REFUSED(0, length = 33);                /* scratch */
    REFUSED(0, source_offset = 33);         /* input */
    REFUSED(0, target_offset = 1);          /* scratch */
    REFUSED(0, source_offset = UINT64_MAX); /* offset + length wraps */
    REFUSED(1, length = UINT64_MAX);
    REFUSED(2, target_offset = 65);
    REFUSED(3, target_offset = UINT64_MAX - 63);
    REFUSED(6, source_offset = 9); /* staging */
    struct draft draft = sound();
    draft.steps[6].source_offset = 16; /* nothing, right at the end */
    draft.steps[6].length = 0;
    CHECK_EQ(create(&draft), CL_OK);
}

TEST(test_order)
{
    REFUSED(0, successor_first = 100);
    REFUSED(0, successor_count = 100);
    REFUSED(0, successor_first = UINT32_MAX);
    REFUSED(3, dependencies = 1); /* it would run before its second predecessor has ended, and a step twice */
    REFUSED(3, dependencies = 3); /* it would never run */
    REFUSED(0, dependencies = 1);
    REFUSED(0, successor_count = 0);
    struct draft draft = sound();
    draft.successors[0] = draft.step_count;
    CHECK_EQ(create(&draft), CL_EINVAL);
    draft = sound();
    draft_order(&draft, 6, 2); /* a cycle */
    draft_lay_out(&draft);
    CHECK_EQ(create(&draft), CL_EINVAL);
    draft = sound();
    draft_order(&draft, 0, 0);
    draft_lay_out(&draft);
    CHECK_EQ(create(&draft), CL_EINVAL);
}

static uint32_t draw(uint64_t *state, uint32_t bound) /* xorshift64, Marsaglia 2003 */
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 32) % bound;
}

/* Every acyclic order is accepted; with one edge backwards it is accepted exactly when no path closes the cycle. */
TEST(test_random_orders)
{
    enum { STEPS = 12 };
    uint64_t state = 88172645463325252u;
    int refused = 0;
    for (int round = 0; round < 500; round++) {
        struct draft draft = {.world_size = 1};
        bool reaches[STEPS][STEPS] = {{false}};
        for (uint32_t i = 0; i < STEPS; i++)
            draft_add(&draft, (struct cl_step){.kind = CL_COPY}, DRAFT_NONE);
        for (int e = 0; e < 16; e++) {
            uint32_t a = draw(&state, STEPS), b = draw(&state, STEPS);
            if (a == b)
                continue;
            draft_order(&draft, a < b ? a : b, a < b ? b : a);
            reaches[a < b ? a : b][a < b ? b : a] = true;
        }
        draft_lay_out(&draft);
        CHECK_EQ(create(&draft), CL_OK);
        for (uint32_t k = 0; k < STEPS; k++)
            for (uint32_t i = 0; i < STEPS; i++)
                for (uint32_t j = 0; j < STEPS; j++)
                    reaches[i][j] |= reaches[i][k] && reaches[k][j];
        uint32_t low = draw(&state, STEPS - 1), high = low + 1 + draw(&state, STEPS - 1 - low);
        draft_order(&draft, high, low);
        draft_lay_out(&draft);
        CHECK_EQ(create(&draft), reaches[low][high] ? CL_EINVAL : CL_OK);
        refused += reaches[low][high];
    }
    CHECK(refused > 50 && refused < 450); /* both answers occurred */
}

static bool is_mutual(struct draft draft)
{
    SCOPED_PLAN *plan = draft_finish(&draft);
    CHECK(plan != NULL);
    return plan->mutual;
}

TEST(test_mutual)
{
    struct draft draft = {.world_size = 3, .input_bytes = 4, .output_bytes = 4};
    struct cl_step send = {.kind = CL_SEND, .peer = 1, .length = 4};
    struct cl_step receive = {.kind = CL_RECV_COPY, .peer = 1, .target = CL_OUTPUT, .length = 4};
    CHECK(!is_mutual(draft));
    draft_add(&draft, send, DRAFT_NONE);
    CHECK(!is_mutual(draft));
    draft_add(&draft, receive, DRAFT_NONE);
    CHECK(is_mutual(draft));
    draft.steps[1].kind = CL_RECV_REDUCE;
    CHECK(is_mutual(draft));
    draft.steps[0].peer = 2;
    CHECK(!is_mutual(draft));
    draft.steps[0] = (struct cl_step){.kind = CL_POST, .message = 1};
    CHECK(is_mutual(draft)); /* it sends nothing */
}

/* A plan for which there is no memory is not a bad one. */
TEST(test_without_memory)
{
    struct draft draft = sound();
    uint32_t made = 0;
    enum { TRIES = 200 };
    for (uint64_t seed = 0; seed < TRIES; seed++) {
        struct sim_scarcity scarcity = {.random = sim_random_seeded(seed, 0)};
        cl_plan *plan = NULL;
        sim_scarcity_set(&scarcity, 0.15);
        int status = draft_create(&draft, &plan);
        sim_scarcity_set(NULL, 0);
        CHECK_EQ(status, scarcity.failed > 0 ? CL_ENOMEM : CL_OK);
        CHECK((plan != NULL) == (status == CL_OK));
        made += status == CL_OK;
        cl_plan_release(plan);
    }
    CHECK(made > 0 && made < TRIES);
}
