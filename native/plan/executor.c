#include "plan/executor.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/prefetch.h"
#include "protocol/packet.h"

_Static_assert((int)CL_CODEC_BLOCK_BYTES_MAX == 576 - 48 - (int)CL_PACKET_HEAD_BYTES, "what codec.h says of packets");

enum {
    TRAILING_BYTES = 1 << 20, /* the most values that are left to send: a group that closes waits for them, and not for
                                 ever (CL_EAGER_FLUSH_MAX_US) */
    COPIED_BYTES = 65536,     /* the most to copy at any rate, as of an eager message */
    COPIED_PER_US = 256, /* ... and for each microsecond of the round trip: an acknowledgement takes at least half of
                            it, and the copy an eighth of that half, at 4 GB/s */
};

/* Names a network step in the endpoint's completions. */
struct token {
    struct cl_executor *executor;
    uint32_t step;
};

struct cl_executor {
    struct cl_executor_config config;
    struct cl_host_view host;
    uint8_t *scratch;
    void *owner;
    int status;
    uint32_t culprit;
    uint32_t remaining;
    uint32_t sends;                  /* those of them that were posted */
    uint32_t ready_head, ready_tail; /* FIFO: each step enters once, so it never wraps */
    uint32_t await_count;
    uint32_t token_count;
    uint32_t *pending;
    uint32_t *ready;
    uint32_t *awaiting;
    struct token *tokens;
    struct cl_missing missing;
    uint64_t deadline_us; /* absolute; 0: not set yet, UINT64_MAX: none */
    uint64_t first_us;    /* see cl_executor_first_us */
    uint64_t last_us;     /* see cl_executor_last */
    uint32_t last_rank;
    uint8_t *heard;  /* by rank: whether its first data has come */
    uint8_t *copied; /* what sends read that were left when the caller got its memory back */
};

int cl_executor_create(const struct cl_executor_config *config, struct cl_executor **out)
{
    const struct cl_plan *plan = config->plan;
    if ((plan->uses_host && config->host == NULL) || (plan->network_steps > 0 && config->endpoint == NULL))
        return CL_EINVAL;
    /* One block: allocations dominate the cost of a small operation. */
    size_t numbers = 3 * (size_t)plan->step_count * sizeof(uint32_t);
    size_t head = (sizeof(struct cl_executor) + 15) & ~(size_t)15;
    size_t tokens = plan->network_steps * sizeof(struct token);
    uint8_t *block = malloc(head + tokens + numbers + plan->world_size);
    if (block == NULL)
        return CL_ENOMEM;
    struct cl_executor *executor = (struct cl_executor *)(void *)block;
    memset(executor, 0, sizeof *executor);
    executor->config = *config;
    if (config->host != NULL)
        executor->host = *config->host;
    executor->tokens = (struct token *)(void *)(block + head);
    executor->pending = (uint32_t *)(void *)(block + head + tokens);
    executor->ready = executor->pending + plan->step_count;
    executor->awaiting = executor->ready + plan->step_count;
    executor->heard = block + head + tokens + numbers;
    memset(executor->heard, 0, plan->world_size);
    executor->remaining = plan->step_count;
    executor->culprit = UINT32_MAX;
    if (plan->scratch_bytes > 0) {
        executor->scratch = malloc(plan->scratch_bytes);
        if (executor->scratch == NULL) {
            free(block);
            return CL_ENOMEM;
        }
    }
    for (uint32_t i = 0; i < plan->step_count; i++)
        executor->pending[i] = plan->steps[i].dependencies;
    memcpy(executor->ready, plan->roots, plan->root_count * sizeof *plan->roots);
    executor->ready_tail = plan->root_count;
    if (plan->network_steps > 0) {
        int status = cl_endpoint_begin(config->endpoint, config->group, config->sequence, config->signature);
        if (status != CL_OK) {
            free(executor->scratch);
            free(block);
            return status;
        }
    }
    *out = executor;
    return CL_OK;
}

void cl_executor_destroy(struct cl_executor *executor)
{
    if (executor == NULL)
        return;
    if (executor->config.plan->network_steps > 0)
        cl_endpoint_end(executor->config.endpoint, executor->config.group, executor->config.sequence);
    cl_missing_free(&executor->missing);
    free(executor->copied);
    free(executor->scratch);
    free(executor);
}

static const struct cl_host_place *host_place(const struct cl_executor *executor, uint32_t rank)
{
    return &executor->host.places[executor->host.index[rank]];
}

static uint8_t *address(const struct cl_executor *executor, uint32_t buffer, uint32_t rank, uint64_t offset)
{
    switch (buffer) {
    case CL_INPUT:
        return executor->config.input + offset;
    case CL_OUTPUT:
        return executor->config.output + offset;
    case CL_SCRATCH:
        return executor->scratch + offset;
    default:
        return host_place(executor, rank)->staging[executor->host.parity] + offset;
    }
}

static void finish_step(struct cl_executor *executor, uint32_t index)
{
    const struct cl_plan *plan = executor->config.plan;
    const struct cl_step *step = &plan->steps[index];
    executor->remaining--;
    for (uint32_t i = 0; i < step->successor_count; i++) {
        uint32_t next = plan->successors[step->successor_first + i];
        if (--executor->pending[next] == 0)
            executor->ready[executor->ready_tail++] = next;
    }
}

/* Notes that data of a rank came. at_us 0: before this rank looked for it. */
static void hear(struct cl_executor *executor, uint32_t rank, uint64_t at_us)
{
    if (executor->heard[rank])
        return;
    executor->heard[rank] = 1;
    if (at_us > executor->last_us) {
        executor->last_us = at_us;
        executor->last_rank = rank;
    }
}

/* Whether the AWAIT is met. If it is, but its peer runs another operation, the executor fails with CL_EMISMATCH. */
static bool counter_reached(struct cl_executor *executor, const struct cl_step *step)
{
    const struct cl_host_view *host = &executor->host;
    const struct cl_host_place *place = host_place(executor, step->peer);
    uint32_t value = atomic_load_explicit(place->counter, memory_order_acquire);
    if ((int32_t)(value - (host->base + step->message)) < 0)
        return false;
    _Atomic uint64_t *signature = place->signatures[host->parity];
    if (signature != NULL && step->message > 0 &&
        atomic_load_explicit(signature, memory_order_relaxed) != host->signature && executor->status == CL_OK) {
        executor->status = CL_EMISMATCH;
        executor->culprit = step->peer;
    }
    return true;
}

/* Fails with CL_EMISMATCH if the peer has told another number than this rank expects. */
static void check_number(struct cl_executor *executor, const struct cl_step *step)
{
    uint64_t told;
    memcpy(&told, address(executor, CL_STAGING, step->peer, step->source_offset), sizeof told);
    if (told == step->target_offset || executor->status != CL_OK)
        return;
    executor->status = CL_EMISMATCH;
    executor->culprit = step->peer;
}

/* Most packets of a message arrive in order, with other work between them. Meanwhile the memory of the next one comes
 * into the cache, which makes the engine about 6 % cheaper (bench/floor.py). */
static void deliver_reduce(void *target, size_t offset, const void *payload, size_t length, void *argument)
{
    const struct token *token = argument;
    const struct cl_arithmetic *arithmetic = &token->executor->config.arithmetic;
    uint8_t *values = (uint8_t *)target + offset;
    arithmetic->reduce(values, payload, length / arithmetic->element_bytes);
    cl_prefetch((uintptr_t)values + length, length);
}

/* The blocks of a step, from the n-th on, as group rank `encoder` encodes them. */
static struct cl_codec_place place_of(const struct cl_executor *executor, const struct cl_step *step, uint32_t encoder,
                                      uint64_t n)
{
    return (struct cl_codec_place){cl_codec_key(executor->config.codec_key, encoder), step->block + n};
}

static void deliver_encoded(void *target, size_t offset, const void *payload, size_t length, void *argument)
{
    const struct token *token = argument;
    const struct cl_step *step = &token->executor->config.plan->steps[token->step];
    const struct cl_codec *codec = cl_step_codec(step);
    struct cl_range values = cl_step_values(step, codec, &(struct cl_range){offset, offset + length});
    struct cl_codec_place place = place_of(token->executor, step, step->peer, offset / codec->block_bytes);
    (step->kind == CL_RECV_REDUCE ? codec->decode_add : codec->decode)(
        (float *)target + values.start / sizeof(float), payload, (values.end - values.start) / sizeof(float), place);
}

/* The qos of the step's message. */
static struct cl_qos qos_of(struct cl_executor *executor, const struct cl_step *step, uint64_t now_us)
{
    const struct cl_executor_config *config = &executor->config;
    const struct cl_codec *codec = cl_step_codec(step);
    struct cl_blocks blocks = {0};
    if (codec != NULL)
        blocks = (struct cl_blocks){codec->block_bytes, codec->block_values * (uint32_t)sizeof(float), step->length};
    if ((step->flags & CL_STEP_PARTIAL) == 0 || config->qos.loss_bound == 0)
        return (struct cl_qos){.priority = config->priority, .order = config->qos.order, .blocks = blocks};
    struct cl_qos qos = config->qos;
    qos.priority = config->priority;
    qos.blocks = blocks;
    /* The deadline is the operation's: all its messages share it. */
    if (executor->deadline_us == 0)
        executor->deadline_us = qos.deadline_us > 0 ? now_us + qos.deadline_us : UINT64_MAX;
    qos.deadline_us = executor->deadline_us == UINT64_MAX ? 0
                      : executor->deadline_us <= now_us   ? 1
                                                          : executor->deadline_us - now_us;
    if (step->kind == CL_SEND && step->source != CL_INPUT && codec == NULL)
        qos.protect = NULL; /* the map describes CL_INPUT */
    qos.protect_offset += codec == NULL ? step->source_offset : step->target_offset;
    return qos;
}

static struct cl_message_id name_of(const struct cl_executor *executor, const struct cl_step *step)
{
    const struct cl_executor_config *config = &executor->config;
    return (struct cl_message_id){config->group, config->sequence, config->first_message + step->message};
}

static int start_message(struct cl_executor *executor, uint32_t index, const struct cl_step *step, uint64_t now_us)
{
    const struct cl_executor_config *config = &executor->config;
    struct cl_qos qos = qos_of(executor, step, now_us);
    struct token *token = &executor->tokens[executor->token_count++];
    *token = (struct token){executor, index};
    struct cl_message_id id = name_of(executor, step);
    uint16_t peer = config->peers[step->peer];
    const struct cl_codec *codec = cl_step_codec(step);
    uint32_t length = (uint32_t)(codec == NULL ? step->length : cl_codec_bytes(codec, step->length / sizeof(float)));
    if (step->kind == CL_SEND) {
        int status =
            cl_endpoint_post_send(config->endpoint, peer, id, address(executor, step->source, 0, step->source_offset),
                                  length, &qos, now_us, token);
        executor->sends += status == CL_OK;
        return status;
    }
    cl_deliver_fn deliver = codec != NULL ? deliver_encoded : step->kind == CL_RECV_REDUCE ? deliver_reduce : NULL;
    struct cl_sink sink = {address(executor, step->target, 0, step->target_offset), deliver, token};
    return cl_endpoint_post_receive(config->endpoint, peer, id, sink, length, &qos, now_us, token);
}

/* Scales a partial sum up: the sum of the contributions that arrived, divided by their number, times the ranks. */
static void rescale(const struct cl_executor *executor, uint8_t *target, size_t length, uint32_t absent)
{
    const struct cl_arithmetic *arithmetic = &executor->config.arithmetic;
    uint32_t ranks = executor->config.plan->world_size;
    size_t element = arithmetic->element_bytes;
    arithmetic->scale(target, length / element, ranks - absent);
    while (length > 0) {
        uint8_t once[1024]; /* whole elements of any type */
        size_t part = length < sizeof once ? length : sizeof once;
        memcpy(once, target, part);
        for (uint32_t i = 1; i < ranks; i++)
            arithmetic->reduce(target, once, part / element);
        target += part;
        length -= part;
    }
}

/* A divisor of 1 marks where a sum is complete. */
static void scale(const struct cl_executor *executor, const struct cl_step *step)
{
    const struct cl_arithmetic *arithmetic = &executor->config.arithmetic;
    uint8_t *base = address(executor, step->target, 0, 0);
    uint64_t end = step->target_offset + step->length, start = step->target_offset;
    bool rescales = executor->config.qos.treatment == CL_RESCALE && step->target == CL_OUTPUT;
    for (uint64_t at = start; start < end; start = at) {
        uint32_t absent = 0, ranks = executor->config.plan->world_size, divisor = step->peer;
        if (rescales)
            absent = cl_missing_next(&executor->missing, &at, end) * (step->message > 1 ? step->message : 1);
        else
            at = end;
        if (absent > 0 && divisor == ranks)
            divisor = ranks - absent; /* the mean of the contributions that arrived */
        else if (absent > 0)
            rescale(executor, base + start, at - start, absent);
        if (divisor > 1)
            arithmetic->scale(base + start, (at - start) / arithmetic->element_bytes, divisor);
    }
}

/* Encodes in parts that stay in the cache until their error is taken. */
static void encode(const struct cl_executor *executor, const struct cl_step *step, const struct cl_codec *codec)
{
    const float *source = (const void *)address(executor, step->source, 0, step->source_offset);
    float *kept = step->flags & CL_STEP_KEEP ? (void *)address(executor, CL_INPUT, 0, step->source_offset) : NULL;
    uint8_t *target = address(executor, CL_SCRATCH, 0, step->target_offset);
    size_t count = step->length / sizeof(float);
    for (size_t at = 0; at < count; at += CL_CODEC_PART_VALUES) {
        size_t part = count - at < CL_CODEC_PART_VALUES ? count - at : CL_CODEC_PART_VALUES;
        struct cl_codec_place place = place_of(executor, step, executor->config.plan->rank, at / codec->block_values);
        uint8_t *encoded = target + cl_codec_bytes(codec, at);
        codec->encode(encoded, source + at, part, place);
        if (kept == NULL)
            continue;
        float decoded[CL_CODEC_PART_VALUES];
        codec->decode(decoded, encoded, part, place);
        cl_codec_keep_error(kept + at, source + at, decoded, part, (float)step->factor);
    }
}

/* Notes that bytes of the operation moved; at 0: unknown when. */
static void move(struct cl_executor *executor, uint64_t at_us)
{
    if (at_us != 0 && (executor->first_us == 0 || at_us < executor->first_us))
        executor->first_us = at_us;
}

static bool uses_host(const struct cl_step *step)
{
    return step->kind == CL_POST || (cl_step_reads(step->kind) && step->source == CL_STAGING) ||
           (cl_step_writes(step->kind) && step->target == CL_STAGING);
}

/* Returns whether the step is done already. */
static bool start_step(struct cl_executor *executor, uint32_t index, uint64_t now_us)
{
    const struct cl_step *step = &executor->config.plan->steps[index];
    const struct cl_arithmetic *arithmetic = &executor->config.arithmetic;
    const struct cl_codec *codec = cl_step_codec(step);
    uint8_t *target = NULL, *source = NULL;
    switch (step->kind) {
    case CL_ENCODE:
        encode(executor, step, codec);
        return true;
    case CL_COPY:
        source = address(executor, step->source, step->peer, step->source_offset);
        target = address(executor, step->target, step->peer, step->target_offset);
        if (codec != NULL)
            codec->decode((float *)(void *)target, source, step->length / sizeof(float),
                          place_of(executor, step, executor->config.plan->rank, 0));
        else if (source != target)
            arithmetic->copy(target, source, step->length);
        return true;
    case CL_REDUCE:
        source = address(executor, step->source, step->peer, step->source_offset);
        target = address(executor, step->target, step->peer, step->target_offset);
        arithmetic->reduce(target, source, step->length / arithmetic->element_bytes);
        return true;
    case CL_SCALE:
        scale(executor, step);
        return true;
    case CL_POST:
        executor->host.post(executor->host.context, executor->host.queue, executor->host.base + step->message);
        return true;
    case CL_TELL:
        target = address(executor, CL_STAGING, step->peer, step->target_offset);
        memcpy(target, &step->source_offset, sizeof step->source_offset);
        return true;
    case CL_CHECK:
        check_number(executor, step);
        return true;
    case CL_AWAIT:
        if (counter_reached(executor, step)) {
            hear(executor, step->peer, 0);
            return true;
        }
        executor->awaiting[executor->await_count++] = index;
        return false;
    default: {
        int status = start_message(executor, index, step, now_us);
        if (status != CL_OK && executor->status == CL_OK) {
            executor->status = status;
            if (status == CL_EPEERLOST)
                executor->culprit = step->peer;
        }
        return false;
    }
    }
}

static void check_awaits(struct cl_executor *executor, uint64_t now_us)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < executor->await_count; i++) {
        uint32_t index = executor->awaiting[i];
        const struct cl_step *step = &executor->config.plan->steps[index];
        if (counter_reached(executor, step)) {
            hear(executor, step->peer, now_us);
            finish_step(executor, index);
        } else {
            executor->awaiting[kept++] = index;
        }
    }
    executor->await_count = kept;
}

enum cl_progress cl_executor_poll(struct cl_executor *executor, size_t budget, uint64_t now_us)
{
    size_t moved = 0;
    for (;;) {
        if (executor->await_count > 0)
            check_awaits(executor, now_us);
        if (executor->status != CL_OK)
            return CL_PROGRESS_FAILED;
        if (executor->ready_head == executor->ready_tail)
            break;
        while (executor->ready_head < executor->ready_tail && executor->status == CL_OK) {
            if (moved >= budget)
                return CL_PROGRESS_MORE;
            uint32_t index = executor->ready[executor->ready_head++];
            const struct cl_step *step = &executor->config.plan->steps[index];
            if (executor->first_us == 0 && uses_host(step))
                move(executor, now_us);
            if (start_step(executor, index, now_us)) {
                if (step->kind >= CL_COPY)
                    moved += step->length;
                finish_step(executor, index);
            }
        }
    }
    return executor->remaining == 0 ? CL_PROGRESS_DONE : CL_PROGRESS_BLOCKED;
}

struct cl_executor *cl_executor_complete(void *context, int status)
{
    const struct token *token = context;
    struct cl_executor *executor = token->executor;
    if (status == CL_OK)
        finish_step(executor, token->step);
    else if (executor->status == CL_OK)
        executor->status = status;
    executor->sends -= status == CL_OK && executor->config.plan->steps[token->step].kind == CL_SEND;
    return executor;
}

/* The last send among the first *left steps that has not ended; NULL: there is none. *left: the steps before it. */
static const struct cl_step *find_send(const struct cl_executor *executor, uint32_t *left)
{
    const struct cl_executor_config *config = &executor->config;
    while (*left > 0) {
        const struct cl_step *step = &config->plan->steps[--*left];
        if (step->kind == CL_SEND &&
            cl_endpoint_is_sending(config->endpoint, config->peers[step->peer], name_of(executor, step)))
            return step;
    }
    return NULL;
}

/* Whether a send reads what another one reads, too, as those of a result to several ranks do. */
static bool reads_same(const struct cl_step *step, const struct cl_step *other)
{
    return other != NULL && step->source == other->source && step->source_offset == other->source_offset &&
           step->length == other->length;
}

/* Sums what is left to copy. False: too much is left. */
static bool count_copied(const struct cl_executor *executor, uint64_t *copied_bytes)
{
    const struct cl_executor_config *config = &executor->config;
    uint64_t trailing = 0, most = COPIED_BYTES;
    const struct cl_step *step, *copied = NULL;
    *copied_bytes = 0;
    for (uint32_t left = config->plan->step_count; (step = find_send(executor, &left)) != NULL;) {
        trailing += step->length;
        if (trailing > TRAILING_BYTES)
            return false;
        if (step->source == CL_SCRATCH)
            continue;
        uint64_t worth = COPIED_PER_US * cl_endpoint_round_us(config->endpoint, config->peers[step->peer]);
        most = worth > most ? worth : most;
        *copied_bytes += reads_same(step, copied) ? 0 : step->length;
        copied = step;
    }
    return *copied_bytes <= most;
}

static void copy_sent(struct cl_executor *executor)
{
    const struct cl_executor_config *config = &executor->config;
    const struct cl_step *step, *copied = NULL;
    uint8_t *next = executor->copied, *last = NULL;
    for (uint32_t left = config->plan->step_count; (step = find_send(executor, &left)) != NULL;) {
        if (step->source == CL_SCRATCH)
            continue;
        if (!reads_same(step, copied)) {
            copied = step;
            last = next;
            memcpy(last, address(executor, step->source, 0, step->source_offset), step->length);
            next += step->length;
        }
        cl_endpoint_move_send(config->endpoint, config->peers[step->peer], name_of(executor, step), last);
    }
}

bool cl_executor_may_release(const struct cl_executor *executor, uint64_t *copied_bytes)
{
    return executor->status == CL_OK && executor->remaining == executor->sends && count_copied(executor, copied_bytes);
}

bool cl_executor_release(struct cl_executor *executor, uint64_t copied_bytes)
{
    executor->copied = malloc(copied_bytes + 1);
    if (executor->copied == NULL)
        return false;
    copy_sent(executor);
    return true;
}

void cl_executor_moved(void *context, uint64_t first_us)
{
    const struct token *token = context;
    const struct cl_step *step = &token->executor->config.plan->steps[token->step];
    move(token->executor, first_us);
    if (step->kind != CL_SEND)
        hear(token->executor, step->peer, first_us);
}

uint64_t cl_executor_first_us(const struct cl_executor *executor)
{
    return executor->first_us;
}

bool cl_executor_last(const struct cl_executor *executor, uint32_t *rank, uint64_t *at_us)
{
    *rank = executor->last_rank;
    *at_us = executor->last_us;
    return executor->last_us > 0;
}

void cl_executor_unheard(const struct cl_executor *executor, uint8_t *awaited)
{
    const struct cl_plan *plan = executor->config.plan;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct cl_step *step = &plan->steps[i];
        bool receives = step->kind == CL_RECV_COPY || step->kind == CL_RECV_REDUCE;
        if (receives && !executor->heard[step->peer])
            awaited[step->peer] = 1;
        if (step->kind != CL_AWAIT || executor->heard[step->peer])
            continue;
        uint32_t value = atomic_load_explicit(host_place(executor, step->peer)->counter, memory_order_acquire);
        if ((int32_t)(value - (executor->host.base + step->message)) < 0)
            awaited[step->peer] = 1;
    }
}

/* Adds encoded values that were lost to the error that encoding them has left in CL_INPUT. */
static void restore(const struct cl_executor *executor, const struct cl_step *step, const struct cl_range *lost)
{
    const struct cl_codec *codec = cl_step_codec(step);
    struct cl_range values = cl_step_values(step, codec, lost);
    codec->decode_add((float *)(void *)address(executor, CL_INPUT, 0, step->target_offset + values.start),
                      address(executor, CL_SCRATCH, 0, step->source_offset + lost->start),
                      (values.end - values.start) / sizeof(float),
                      place_of(executor, step, executor->config.plan->rank, lost->start / codec->block_bytes));
}

void cl_executor_missed(void *context, const struct cl_range *ranges, uint32_t count)
{
    const struct token *token = context;
    struct cl_executor *executor = token->executor;
    const struct cl_step *step = &executor->config.plan->steps[token->step];
    if (!cl_missing_add(&executor->missing, step, ranges, count) && executor->status == CL_OK)
        executor->status = CL_ENOMEM;
    bool restores =
        step->kind == CL_SEND && step->flags & CL_STEP_KEEP && executor->config.qos.treatment == CL_FEEDBACK;
    for (uint32_t i = 0; i < count && restores; i++)
        restore(executor, step, &ranges[i]);
}

struct cl_missing *cl_executor_missing(struct cl_executor *executor)
{
    return &executor->missing;
}

int cl_executor_status(const struct cl_executor *executor)
{
    return executor->status;
}

uint32_t cl_executor_culprit(const struct cl_executor *executor)
{
    return executor->culprit;
}

bool cl_executor_awaits(const struct cl_executor *executor, uint32_t n, uint32_t *rank, uint32_t *value)
{
    if (n >= executor->await_count)
        return false;
    const struct cl_step *step = &executor->config.plan->steps[executor->awaiting[n]];
    *rank = step->peer;
    *value = executor->host.base + step->message;
    return true;
}

bool cl_executor_needs(const struct cl_executor *executor, uint32_t rank, uint32_t *value)
{
    const struct cl_plan *plan = executor->config.plan;
    uint32_t most = 0;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct cl_step *step = &plan->steps[i];
        if (executor->pending[i] > 0 && step->kind == CL_AWAIT && step->peer == rank && step->message > most)
            most = step->message;
    }
    *value = executor->host.base + most;
    return most > 0;
}

void cl_executor_set_owner(struct cl_executor *executor, void *owner)
{
    executor->owner = owner;
}

void *cl_executor_owner(const struct cl_executor *executor)
{
    return executor->owner;
}
