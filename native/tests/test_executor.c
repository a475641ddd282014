/* Executors: the order of their steps, their waits and their failures. Messages go over network.h; arrays are
 * the shared memory. */
#include "plan/executor.h"
#include "protocol/packet.h"
#include "tests/check.h"
#include "tests/draft.h"
#include "tests/network.h"

static void add(void *target, const void *source, size_t count)
{
    uint32_t *to = target;
    const uint32_t *from = source;
    for (size_t i = 0; i < count; i++)
        to[i] += from[i];
}

static void divide(void *target, size_t count, uint32_t divisor)
{
    uint32_t *to = target;
    for (size_t i = 0; i < count; i++)
        to[i] /= divisor;
}

static void copy(void *target, const void *source, size_t length)
{
    memcpy(target, source, length);
}

static const struct cl_arithmetic ARITHMETIC = {4, add, divide, copy};
static const uint16_t PEERS[] = {0, 1, 2};

enum { WORDS = 4, BYTES = 4 * WORDS };

static cl_plan *one_step(struct cl_step step)
{
    struct draft draft = {
        .world_size = 3, .input_bytes = BYTES, .output_bytes = BYTES, .scratch_bytes = BYTES, .staging_bytes = BYTES};
    draft_add(&draft, step, DRAFT_NONE);
    return draft_finish(&draft);
}

static struct cl_executor *create(const struct cl_executor_config *config)
{
    struct cl_executor *executor = NULL;
    CHECK_EQ(cl_executor_create(config, &executor), CL_OK);
    return executor;
}

static void leave(struct cl_executor *const *executor)
{
    cl_executor_destroy(*executor);
}

#define SCOPED_EXECUTOR SCOPED(leave) struct cl_executor

TEST(test_moves)
{
    struct draft draft = {.world_size = 1, .input_bytes = BYTES, .output_bytes = BYTES, .scratch_bytes = BYTES};
    struct cl_step step = {.kind = CL_COPY, .target = CL_SCRATCH, .length = BYTES};
    uint32_t last = draft_add(&draft, step, DRAFT_NONE);
    step = (struct cl_step){.kind = CL_REDUCE, .target = CL_SCRATCH, .source_offset = 4, .length = 4};
    last = draft_add(&draft, step, last);
    step = (struct cl_step){.kind = CL_SCALE, .peer = 5, .target = CL_SCRATCH, .target_offset = 8, .length = 8};
    last = draft_add(&draft, step, last);
    step = (struct cl_step){.kind = CL_COPY, .source = CL_SCRATCH, .target = CL_OUTPUT, .length = BYTES};
    last = draft_add(&draft, step, last);
    draft_add(&draft, (struct cl_step){.kind = CL_COPY, .source = CL_OUTPUT, .target = CL_OUTPUT}, last); /* nothing */
    uint32_t input[WORDS] = {1, 20, 300, 4000}, output[WORDS] = {0};
    SCOPED_PLAN *plan = draft_finish(&draft);
    struct cl_executor_config config = {
        .plan = plan, .input = (uint8_t *)input, .output = (uint8_t *)output, .arithmetic = ARITHMETIC, .peers = PEERS};
    SCOPED_EXECUTOR *executor = create(&config);
    cl_executor_set_owner(executor, &config);
    CHECK(cl_executor_owner(executor) == &config);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_DONE);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_DONE);
    CHECK_EQ(output[0], 21);
    CHECK_EQ(output[1], 20);
    CHECK_EQ(output[2], 60);
    CHECK_EQ(output[3], 800);
    cl_executor_destroy(NULL);
}

TEST(test_budget)
{
    struct draft draft = {.world_size = 1, .input_bytes = BYTES, .output_bytes = BYTES};
    for (uint32_t i = 0; i < WORDS; i++)
        draft_add(
            &draft,
            (struct cl_step){
                .kind = CL_COPY, .source_offset = 4 * i, .target = CL_OUTPUT, .target_offset = 4 * i, .length = 4},
            DRAFT_NONE);
    uint32_t input[WORDS] = {1, 2, 3, 4}, output[WORDS] = {0};
    SCOPED_PLAN *plan = draft_finish(&draft);
    struct cl_executor_config config = {
        .plan = plan, .input = (uint8_t *)input, .output = (uint8_t *)output, .arithmetic = ARITHMETIC};
    SCOPED_EXECUTOR *executor = create(&config);
    CHECK_EQ(cl_executor_poll(executor, 5, 0), CL_PROGRESS_MORE); /* two steps: the first leaves some of the budget */
    CHECK_EQ(output[1], 2);
    CHECK_EQ(output[2], 0);
    CHECK_EQ(cl_executor_poll(executor, 5, 0), CL_PROGRESS_DONE);
    CHECK_EQ(output[3], 4);
}

/* ---- shared memory ---- */

struct host {
    uint32_t staging[3][WORDS];
    struct cl_host_place places[3];
    _Atomic uint32_t counters[3];
    uint32_t posted;
};

static void note_post(void *context, uint32_t class, uint32_t value)
{
    struct host *host = context;
    CHECK_EQ(class, 5);
    host->posted++;
    atomic_store(&host->counters[0], value);
}

/* Group ranks 0 to 2 lie in the reverse order in the host's memory. */
static struct cl_host_view view_of(struct host *host, uint32_t base)
{
    static const uint32_t index[] = {2, 1, 0};
    memset(host, 0, sizeof *host);
    for (size_t i = 0; i < 3; i++) {
        host->places[index[i]] =
            (struct cl_host_place){.counter = &host->counters[i], .staging = {NULL, (uint8_t *)host->staging[i]}};
        atomic_init(&host->counters[i], base);
    }
    return (struct cl_host_view){.places = host->places,
                                 .index = index,
                                 .parity = 1,
                                 .base = base,
                                 .queue = 5,
                                 .post = note_post,
                                 .context = host};
}

/* Stages, posts, and waits for two others, at a base that makes the counters wrap around on the way. */
static void host_exchange_from(uint32_t base)
{
    struct host host;
    struct cl_host_view view = view_of(&host, base);
    uint32_t input[WORDS] = {1, 2, 3, 4}, output[WORDS] = {0};
    SCOPED_PLAN *plan = draft_host_exchange(0, 3, BYTES, BYTES);
    struct cl_executor_config config = {
        .plan = plan, .input = (uint8_t *)input, .output = (uint8_t *)output, .arithmetic = ARITHMETIC, .host = &view};
    SCOPED_EXECUTOR *executor = create(&config);
    uint32_t rank = 9, value = 9;
    CHECK(!cl_executor_awaits(executor, 0, &rank, &value));
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    CHECK_EQ(host.posted, 1);
    CHECK_EQ(atomic_load(&host.counters[0]), (uint32_t)(base + 1));
    CHECK_EQ(host.staging[0][3], 4);
    CHECK(cl_executor_awaits(executor, 0, &rank, &value));
    CHECK_EQ(rank, 1);
    CHECK_EQ(value, (uint32_t)(base + 1));
    CHECK(!cl_executor_awaits(executor, 1, &rank, &value));
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    host.staging[1][0] = 10;
    atomic_store(&host.counters[1], base + 2); /* further than asked for is as good */
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    CHECK_EQ(output[0], 11);
    CHECK(cl_executor_awaits(executor, 0, &rank, &value));
    CHECK_EQ(rank, 2);
    host.staging[2][0] = 100;
    atomic_store(&host.counters[2], base + 1);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_DONE);
    CHECK_EQ(output[0], 111);
}

TEST(test_awaits)
{
    host_exchange_from(0);
    host_exchange_from(77);
}

TEST(test_counters_wrap)
{
    host_exchange_from(UINT32_MAX);
    host_exchange_from(UINT32_MAX - 1);
    host_exchange_from(INT32_MAX);
}

/* The peer's counter is high enough, but of another operation: its staging is not read. */
TEST(test_another_call)
{
    struct host host;
    struct cl_host_view view = view_of(&host, 0);
    _Atomic uint64_t signatures[3] = {5, 5, 6};
    for (size_t i = 0; i < 3; i++)
        host.places[2 - i].signatures[1] = &signatures[i];
    view.signature = 5;
    uint32_t input[WORDS] = {1, 2, 3, 4}, output[WORDS] = {0};
    SCOPED_PLAN *plan = draft_host_exchange(0, 3, BYTES, BYTES);
    struct cl_executor_config config = {
        .plan = plan, .input = (uint8_t *)input, .output = (uint8_t *)output, .arithmetic = ARITHMETIC, .host = &view};
    SCOPED_EXECUTOR *executor = create(&config);
    atomic_store(&host.counters[1], 1);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    CHECK_EQ(cl_executor_culprit(executor), UINT32_MAX);
    host.staging[2][0] = 100;
    atomic_store(&host.counters[2], 1);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_FAILED);
    CHECK_EQ(cl_executor_status(executor), CL_EMISMATCH);
    CHECK_EQ(cl_executor_culprit(executor), 2);
    CHECK_EQ(output[0], 1);
}

/* One number into the own staging, and two of others compared, of which one is another. */
TEST(test_numbers)
{
    enum { OWN = 7, THEIRS = 9 };
    for (uint64_t told = THEIRS; told <= THEIRS + 1; told++) {
        struct host host;
        struct cl_host_view view = view_of(&host, 0);
        struct draft draft = {.world_size = 3, .staging_bytes = BYTES};
        draft_add(&draft, (struct cl_step){.kind = CL_TELL, .source_offset = OWN, .target_offset = 8}, DRAFT_NONE);
        draft_add(&draft, (struct cl_step){.kind = CL_CHECK, .peer = 1, .target_offset = THEIRS}, DRAFT_NONE);
        draft_add(&draft, (struct cl_step){.kind = CL_CHECK, .peer = 2, .target_offset = THEIRS}, DRAFT_NONE);
        memcpy(host.staging[1], &(uint64_t){THEIRS}, sizeof(uint64_t));
        memcpy(host.staging[2], &told, sizeof told);
        SCOPED_PLAN *plan = draft_finish(&draft);
        struct cl_executor_config config = {.plan = plan, .arithmetic = ARITHMETIC, .host = &view};
        SCOPED_EXECUTOR *executor = create(&config);
        bool fits = told == THEIRS;
        CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), fits ? CL_PROGRESS_DONE : CL_PROGRESS_FAILED);
        CHECK_EQ(cl_executor_status(executor), fits ? CL_OK : CL_EMISMATCH);
        CHECK_EQ(cl_executor_culprit(executor), fits ? UINT32_MAX : 2);
        CHECK_EQ(host.staging[0][2], OWN);
    }
}

TEST(test_several_awaits)
{
    struct draft draft = {.world_size = 3};
    for (uint32_t peer = 1; peer < 3; peer++)
        draft_add(&draft, (struct cl_step){.kind = CL_AWAIT, .peer = peer, .message = peer}, DRAFT_NONE);
    struct host host;
    struct cl_host_view view = view_of(&host, 40);
    SCOPED_PLAN *plan = draft_finish(&draft);
    struct cl_executor_config config = {.plan = plan, .arithmetic = ARITHMETIC, .host = &view};
    SCOPED_EXECUTOR *executor = create(&config);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    uint32_t rank, value;
    CHECK(cl_executor_awaits(executor, 1, &rank, &value));
    CHECK_EQ(rank, 2);
    CHECK_EQ(value, 42);
    atomic_store(&host.counters[1], 41);
    CHECK_EQ(cl_executor_poll(executor, SIZE_MAX, 0), CL_PROGRESS_BLOCKED);
    CHECK(cl_executor_awaits(executor, 0, &rank, &value));
    CHECK_EQ(rank, 2); /* the met one is gone from the list */
    CHECK(!cl_executor_awaits(executor, 1, &rank, &value));
    /* its end comes in the middle: nothing to undo */
}

/* ---- messages ---- */

/* Lets only a part of host 0's message arrive, its data before an offset, and acknowledgements to host 0. */
static bool drops_rest(struct network *network, uint32_t from, const struct cl_datagram *datagram)
{
    const uint32_t *deaf_from = network->argument;
    if (from == 1)
        return cl_packet_kind(datagram->head) != CL_PACKET_ACK;
    return datagram->payload_length == 0 || cl_load_u32(datagram->head + 20) >= *deaf_from;
}

static void on_completion(struct network_host *host, const struct cl_completion *completion)
{
    (void)host;
    if (completion->missing_count > 0)
        cl_executor_missed(completion->context, completion->missing, completion->missing_count);
    cl_executor_moved(completion->context, completion->first_us);
    cl_executor_complete(completion->context, completion->status);
}

static struct network *open_network(void)
{
    struct network *network = network_new(2, 1, 0, 150, 1 << 20, 7);
    network->hosts[0].on_completion = network->hosts[1].on_completion = on_completion;
    return network;
}

static void pump(struct network *network)
{
    network_run_until(network, network_now_us(network) + 100);
}

static enum cl_progress poll(const struct network *network, struct cl_executor *executor)
{
    return cl_executor_poll(executor, SIZE_MAX, network_now_us(network));
}

static struct cl_executor *start(struct network *network, uint32_t rank, cl_plan *plan, uint32_t *input,
                                 uint32_t *output)
{
    struct cl_executor_config config = {.plan = plan,
                                        .input = (uint8_t *)input,
                                        .output = (uint8_t *)output,
                                        .arithmetic = ARITHMETIC,
                                        .endpoint = network->hosts[rank].endpoint,
                                        .peers = PEERS,
                                        .group = 3};
    return create(&config);
}

TEST(test_messages)
{
    enum { MANY = 5000 };
    static uint32_t input[2][MANY], output[2][MANY];
    struct cl_executor *executors[2];
    cl_plan *plans[2];
    SCOPED_NETWORK *network = open_network();
    for (uint32_t rank = 0; rank < 2; rank++) {
        for (uint32_t i = 0; i < MANY; i++)
            input[rank][i] = (rank + 1) * i;
        plans[rank] = draft_exchange(rank, 2, sizeof input[rank]);
        executors[rank] = start(network, rank, plans[rank], input[rank], output[rank]);
    }
    enum cl_progress progress[2] = {CL_PROGRESS_MORE, CL_PROGRESS_MORE};
    for (int round = 0; round < 1000 && (progress[0] != CL_PROGRESS_DONE || progress[1] != CL_PROGRESS_DONE); round++) {
        for (size_t rank = 0; rank < 2; rank++)
            progress[rank] = poll(network, executors[rank]);
        pump(network);
    }
    for (size_t rank = 0; rank < 2; rank++) {
        CHECK_EQ(progress[rank], CL_PROGRESS_DONE);
        for (uint32_t i = 0; i < MANY; i++)
            CHECK_EQ(output[rank][i], 3 * i);
        cl_executor_destroy(executors[rank]);
        cl_plan_release(plans[rank]);
    }
}

/* The time of the first byte, of a message of several packets: at the sender its first packet's departure, at the
 * receiver its arrival. */
TEST(test_first_byte)
{
    enum { MANY = 5000 };
    static uint32_t input[MANY], output[MANY];
    SCOPED_NETWORK *network = open_network();
    network_run_until(network, network_now_us(network) + 5000); /* without the first PINGs */
    struct draft sender = {.world_size = 2, .input_bytes = sizeof input};
    draft_add(&sender, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = sizeof input}, DRAFT_NONE);
    struct draft receiver = {.rank = 1, .world_size = 2, .output_bytes = sizeof output};
    draft_add(&receiver, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = sizeof output},
              DRAFT_NONE);
    SCOPED_PLAN *sends = draft_finish(&sender), *receives = draft_finish(&receiver);
    SCOPED_EXECUTOR *to = start(network, 1, receives, NULL, output);
    CHECK_EQ(poll(network, to), CL_PROGRESS_BLOCKED);
    uint64_t start_us = network_now_us(network) + 4000;
    network_run_until(network, start_us);
    SCOPED_EXECUTOR *from = start(network, 0, sends, input, NULL);
    CHECK_EQ(poll(network, from), CL_PROGRESS_BLOCKED);
    CHECK_EQ(cl_executor_first_us(from), 0);
    network_sleep(network, 0, 700);
    network_wake(network, 0);
    uint64_t sent_us = 0, received_us = 0;
    while (poll(network, from) != CL_PROGRESS_DONE && network_step(network, start_us + 100000)) {
        if (sent_us == 0 && cl_endpoint_stats(network->hosts[0].endpoint)->payload_bytes_sent > 0)
            sent_us = network_now_us(network);
        if (received_us == 0 && cl_endpoint_stats(network->hosts[1].endpoint)->payload_bytes_received > 0)
            received_us = network_now_us(network);
    }
    CHECK_EQ(poll(network, to), CL_PROGRESS_DONE);
    CHECK_EQ(sent_us, start_us + 700);
    CHECK(received_us >= sent_us + 100);
    CHECK_EQ(cl_executor_first_us(from), sent_us);
    CHECK_EQ(cl_executor_first_us(to), received_us);
    CHECK(network_now_us(network) > received_us);
}

/* Received bytes replace the old ones, and later steps wait until all have come. */
TEST(test_receive_copy)
{
    SCOPED_NETWORK *network = open_network();
    uint32_t input[WORDS] = {6, 7, 8, 9}, output[WORDS] = {1, 1, 1, 1};
    struct draft sender = {.world_size = 2, .input_bytes = BYTES};
    draft_add(&sender, (struct cl_step){.kind = CL_SEND, .peer = 1, .length = BYTES}, DRAFT_NONE);
    struct draft receiver = {.rank = 1, .world_size = 2, .output_bytes = BYTES};
    uint32_t all =
        draft_add(&receiver, (struct cl_step){.kind = CL_RECV_COPY, .target = CL_OUTPUT, .length = BYTES}, DRAFT_NONE);
    draft_add(&receiver, (struct cl_step){.kind = CL_SCALE, .peer = 2, .target = CL_OUTPUT, .length = BYTES}, all);
    SCOPED_PLAN *sends = draft_finish(&sender), *receives = draft_finish(&receiver);
    SCOPED_EXECUTOR *to = start(network, 1, receives, NULL, output);
    CHECK_EQ(poll(network, to), CL_PROGRESS_BLOCKED);
    CHECK_EQ(output[0], 1);
    SCOPED_EXECUTOR *from = start(network, 0, sends, input, NULL);
    CHECK_EQ(poll(network, from), CL_PROGRESS_BLOCKED); /* sent is not acknowledged */
    for (int round = 0; round < 100 && poll(network, from) != CL_PROGRESS_DONE; round++)
        pump(network);
    CHECK_EQ(poll(network, from), CL_PROGRESS_DONE);
    CHECK_EQ(poll(network, to), CL_PROGRESS_DONE);
    CHECK_EQ(output[0], 3);
    CHECK_EQ(output[3], 4);
}

enum { LONG = 1 << 18 }; /* words */

/* Rank 0 sends `length` bytes to rank 1, twice, and gives its memory back before they have left. delay_us: one way; 0:
 * nothing is measured yet. Returns how much was copied; UINT64_MAX: the memory is still needed. */
static uint64_t release_after(uint64_t delay_us, uint32_t length, enum cl_buffer source)
{
    static uint32_t input[LONG], output[2][LONG];
    SCOPED_NETWORK *network = open_network();
    if (delay_us > 0) {
        network_set_delay(network, delay_us);
        network_run_until(network, network_now_us(network) + 200000); /* with the first PINGs */
    }
    struct draft sender = {.world_size = 2, .input_bytes = sizeof input, .scratch_bytes = sizeof input};
    struct draft receiver = {.rank = 1, .world_size = 2, .output_bytes = sizeof output};
    uint32_t from = DRAFT_NONE;
    if (source == CL_SCRATCH)
        from = draft_add(&sender, (struct cl_step){.kind = CL_COPY, .target = CL_SCRATCH, .length = length}, from);
    for (uint32_t i = 0; i < 2; i++) {
        struct cl_step send = {.kind = CL_SEND, .peer = 1, .message = i, .source = source, .length = length};
        struct cl_step receive = {.kind = CL_RECV_COPY, .message = i, .target = CL_OUTPUT, .length = length};
        receive.target_offset = i * sizeof output[0];
        draft_add(&sender, send, from);
        draft_add(&receiver, receive, DRAFT_NONE);
    }
    SCOPED_PLAN *sends = draft_finish(&sender), *receives = draft_finish(&receiver);
    for (uint32_t i = 0; i < LONG; i++)
        input[i] = i;
    SCOPED_EXECUTOR *to = start(network, 1, receives, NULL, output[0]);
    SCOPED_EXECUTOR *of = start(network, 0, sends, input, NULL);
    uint64_t copied = 0;
    CHECK(!cl_executor_may_release(of, &copied)); /* it has not begun */
    CHECK_EQ(poll(network, to), CL_PROGRESS_BLOCKED);
    CHECK_EQ(poll(network, of), CL_PROGRESS_BLOCKED);
    CHECK(!cl_executor_may_release(to, &copied)); /* it receives */
    bool released = cl_executor_may_release(of, &copied);
    if (released) {
        CHECK(cl_executor_release(of, copied));
        memset(input, 8, sizeof input);
    }
    network_run_until(network, network_now_us(network) + 2000000);
    CHECK_EQ(poll(network, to), CL_PROGRESS_DONE);
    CHECK_EQ(poll(network, of), CL_PROGRESS_DONE);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < length / 4; i++)
        wrong += output[0][i] != i || output[1][i] != i;
    CHECK_EQ(wrong, 0);
    return released ? copied : UINT64_MAX;
}

static uint64_t release(uint32_t length, enum cl_buffer source)
{
    return release_after(0, length, source);
}

TEST(test_release)
{
    CHECK_EQ(release(65536, CL_INPUT), 65536); /* both read the same */
    CHECK_EQ(release(65540, CL_INPUT), UINT64_MAX);
    CHECK_EQ(release(65540, CL_SCRATCH), 0);
    CHECK_EQ(release(524288, CL_SCRATCH), 0);
    CHECK_EQ(release(524292, CL_SCRATCH), UINT64_MAX); /* too much is left to send */
}

/* Where acknowledgements take long, longer copies are worth their time: 256 bytes for each microsecond. */
TEST(test_release_far_away)
{
    CHECK_EQ(release_after(100, 65540, CL_INPUT), UINT64_MAX);
    CHECK_EQ(release_after(500, 250000, CL_INPUT), 250000);
    CHECK_EQ(release_after(500, 280000, CL_INPUT), UINT64_MAX);
    CHECK_EQ(release_after(20000, 524288, CL_INPUT), 524288);
    CHECK_EQ(release_after(20000, 524292, CL_INPUT), UINT64_MAX); /* too much is left to send */
}

/* The owner gets 60 of 100 packets before its deadline, and never hears from the sender again. */
TEST(test_a_deadline_and_what_is_absent)
{
    enum { PAYLOAD = 1432, PACKETS = 100, ARRIVE = 60, COUNT = PACKETS * PAYLOAD / 4, HERE = ARRIVE * PAYLOAD / 4 };
    static uint32_t input[2][COUNT], output[COUNT];
    static const uint32_t TREATMENTS[] = {CL_RESCALE, CL_ZERO};
    for (size_t t = 0; t < 2; t++) {
        SCOPED_NETWORK *network = open_network();
        for (uint32_t i = 0; i < COUNT; i++) {
            input[0][i] = 2 * i;
            input[1][i] = 4 * i;
        }
        struct draft sender = {.world_size = 2, .input_bytes = sizeof input[0]};
        struct cl_step step = {.kind = CL_SEND, .flags = CL_STEP_PARTIAL, .peer = 1, .length = sizeof input[0]};
        draft_add(&sender, step, DRAFT_NONE);
        struct draft owner = {
            .rank = 1, .world_size = 2, .input_bytes = sizeof input[1], .output_bytes = sizeof output};
        step = (struct cl_step){.kind = CL_COPY, .peer = 1, .target = CL_OUTPUT, .length = sizeof output};
        uint32_t last = draft_add(&owner, step, DRAFT_NONE);
        step = (struct cl_step){
            .kind = CL_RECV_REDUCE, .flags = CL_STEP_PARTIAL, .target = CL_OUTPUT, .length = sizeof output};
        last = draft_add(&owner, step, last);
        step = (struct cl_step){.kind = CL_SCALE, .peer = 2, .target = CL_OUTPUT, .length = sizeof output};
        draft_add(&owner, step, last);
        struct draft *drafts[] = {&sender, &owner};
        struct cl_executor *executors[2];
        cl_plan *plans[2];
        for (uint16_t rank = 0; rank < 2; rank++) {
            plans[rank] = draft_finish(drafts[rank]);
            struct cl_executor_config config = {
                .plan = plans[rank],
                .input = (uint8_t *)input[rank],
                .output = (uint8_t *)output,
                .arithmetic = ARITHMETIC,
                .endpoint = network->hosts[rank].endpoint,
                .peers = PEERS,
                .group = 3,
                .qos = {.loss_bound = 0.5, .treatment = (uint8_t)TREATMENTS[t], .deadline_us = 10000}};
            CHECK_EQ(cl_executor_create(&config, &executors[rank]), CL_OK);
        }
        uint32_t deaf_from = ARRIVE * PAYLOAD;
        network->argument = &deaf_from;
        network->drops = drops_rest;
        enum cl_progress progress = CL_PROGRESS_MORE;
        uint64_t start_us = network_now_us(network);
        while (progress != CL_PROGRESS_DONE && network_now_us(network) < start_us + 100000) {
            poll(network, executors[0]);
            progress = poll(network, executors[1]);
            pump(network);
        }
        CHECK_EQ(progress, CL_PROGRESS_DONE);
        CHECK(network_now_us(network) >= start_us + 10000 && network_now_us(network) < start_us + 20000);
        CHECK_EQ(cl_executor_missing(executors[1])->absent_count, 1);
        CHECK_EQ(cl_executor_missing(executors[1])->absent[0].start, ARRIVE * PAYLOAD);
        for (uint32_t i = 0; i < COUNT; i++)
            CHECK_EQ(output[i], i < HERE ? 3 * i : TREATMENTS[t] == CL_RESCALE ? 4 * i : 2 * i);
        network->drops = NULL; /* now the sender hears of it */
        while (poll(network, executors[0]) != CL_PROGRESS_DONE && network_now_us(network) < start_us + 5000000)
            pump(network);
        const struct cl_missing *missing = cl_executor_missing(executors[0]);
        CHECK_EQ(missing->uncounted.count, 1);
        CHECK_EQ(missing->uncounted.list[0].start, ARRIVE * PAYLOAD);
        CHECK_EQ(missing->uncounted.list[0].end, sizeof input[0]);
        for (size_t rank = 0; rank < 2; rank++) {
            cl_executor_destroy(executors[rank]);
            cl_plan_release(plans[rank]);
        }
    }
}

/* The owner gets 12 of 20 packets of encoded values. The sender keeps the error of those, and the lost values whole. */
TEST(test_encoded_messages)
{
    enum { BLOCKS = 11 /* in a packet */, VALUES = 256, BLOCK_BYTES = 130, PACKETS = 20, ARRIVE = 12, KEY = 99 };
    enum { COUNT = PACKETS * BLOCKS * VALUES, HERE = ARRIVE * BLOCKS * VALUES, INT4 = (CL_CODEC_INT4 + 1) << 8 };
    enum { ENCODED_BYTES = PACKETS * BLOCKS * BLOCK_BYTES };
    static float values[COUNT], input[COUNT], output[COUNT], decoded[COUNT];
    static uint8_t encoded[ENCODED_BYTES];
    for (uint32_t i = 0; i < COUNT; i++) {
        values[i] = input[i] = (float)(i * 2654435761u >> 20) - 2048;
        output[i] = (float)i;
    }
    const struct cl_codec *codec = cl_codec_of(CL_CODEC_INT4);
    struct cl_codec_place place = {cl_codec_key(KEY, 0), 0};
    codec->encode(encoded, values, COUNT, place);
    codec->decode(decoded, encoded, COUNT, place);

    struct draft sender = {.world_size = 2, .input_bytes = sizeof input, .scratch_bytes = sizeof encoded};
    struct cl_step step = {.kind = CL_ENCODE, .flags = INT4 | CL_STEP_KEEP, .target = CL_SCRATCH, .factor = 1};
    step.length = sizeof input;
    uint32_t last = draft_add(&sender, step, DRAFT_NONE);
    step = (struct cl_step){.kind = CL_SEND, .flags = INT4 | CL_STEP_KEEP | CL_STEP_PARTIAL, .peer = 1};
    step.source = CL_SCRATCH;
    step.length = sizeof input;
    draft_add(&sender, step, last);
    struct draft owner = {.rank = 1, .world_size = 2, .output_bytes = sizeof output};
    step = (struct cl_step){.kind = CL_RECV_REDUCE, .flags = INT4 | CL_STEP_PARTIAL, .target = CL_OUTPUT};
    step.length = sizeof output;
    draft_add(&owner, step, DRAFT_NONE);
    SCOPED_PLAN *send = draft_finish(&sender), *receive = draft_finish(&owner);

    SCOPED_NETWORK *network = open_network();
    uint32_t deaf_from = ARRIVE * BLOCKS * BLOCK_BYTES;
    network->argument = &deaf_from;
    network->drops = drops_rest;
    struct cl_executor *executors[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct cl_executor_config config = {.plan = rank == 0 ? send : receive,
                                            .input = (uint8_t *)input,
                                            .output = (uint8_t *)output,
                                            .arithmetic = ARITHMETIC,
                                            .endpoint = network->hosts[rank].endpoint,
                                            .peers = PEERS,
                                            .group = 3,
                                            .codec_key = KEY,
                                            .qos = {.loss_bound = 0.5, .deadline_us = 10000}};
        CHECK_EQ(cl_executor_create(&config, &executors[rank]), CL_OK);
    }
    uint64_t start_us = network_now_us(network);
    for (size_t rank = 2; rank-- > 0; network->drops = NULL) /* the sender hears of it when the owner is done */
        while (poll(network, executors[rank]) != CL_PROGRESS_DONE && network_now_us(network) < start_us + 5000000) {
            poll(network, executors[0]);
            pump(network);
        }
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK(output[i] == (i < HERE ? (float)i + decoded[i] : (float)i));
        CHECK(input[i] == (i < HERE ? values[i] - decoded[i] : values[i] - decoded[i] + decoded[i]));
    }
    for (size_t rank = 0; rank < 2; rank++)
        cl_executor_destroy(executors[rank]);
}

TEST(test_failure)
{
    SCOPED_NETWORK *network = open_network();
    uint32_t input[WORDS] = {0}, output[WORDS] = {0};
    SCOPED_PLAN *plan = draft_exchange(0, 2, BYTES);
    struct cl_executor *executor = start(network, 0, plan, input, output);
    CHECK_EQ(poll(network, executor), CL_PROGRESS_BLOCKED);
    CHECK_EQ(cl_executor_status(executor), CL_OK);
    cl_endpoint_peer_lost(network->hosts[0].endpoint, 1);
    pump(network);
    CHECK_EQ(poll(network, executor), CL_PROGRESS_FAILED);
    CHECK_EQ(cl_executor_status(executor), CL_EPEERLOST);
    cl_executor_destroy(executor);
    executor = start(network, 0, plan, input, output); /* the post itself is refused now */
    CHECK_EQ(poll(network, executor), CL_PROGRESS_FAILED);
    CHECK_EQ(cl_executor_status(executor), CL_EPEERLOST);
    cl_executor_destroy(executor);
}

TEST(test_what_is_missing)
{
    struct cl_executor *executor;
    struct cl_executor_config config = {.plan = one_step((struct cl_step){.kind = CL_SEND, .peer = 1, .length = 4}),
                                        .arithmetic = ARITHMETIC};
    CHECK_EQ(cl_executor_create(&config, &executor), CL_EINVAL); /* no endpoint */
    cl_plan_release(config.plan);
    config.plan = one_step((struct cl_step){.kind = CL_AWAIT, .peer = 1, .message = 1});
    CHECK_EQ(cl_executor_create(&config, &executor), CL_EINVAL); /* no shared memory */
    cl_plan_release(config.plan);
}
