#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

bool cl_step_reads(uint32_t kind)
{
    return kind == CL_SEND || kind == CL_COPY || kind == CL_REDUCE || kind == CL_ENCODE;
}

bool cl_step_writes(uint32_t kind)
{
    return kind == CL_RECV_COPY || kind == CL_RECV_REDUCE || kind == CL_COPY || kind == CL_REDUCE || kind == CL_SCALE ||
           kind == CL_ENCODE;
}

static bool range_fits(uint64_t offset, uint64_t length, uint64_t size)
{
    return offset <= size && length <= size - offset;
}

/* Steps with a codec, beyond what holds for all steps. */
static bool codec_is_valid(const struct cl_step *step, const struct cl_codec *codec, const uint64_t sizes[4])
{
    uint64_t encoded = cl_codec_bytes(codec, step->length / sizeof(float));
    bool keeps = (step->flags & CL_STEP_KEEP) != 0;
    if (step->length % sizeof(float) != 0 || step->length > UINT32_MAX)
        return false;
    switch (step->kind) {
    case CL_SEND:
        return encoded <= UINT32_MAX && step->source == CL_SCRATCH &&
               range_fits(step->source_offset, encoded, sizes[CL_SCRATCH]) &&
               range_fits(step->target_offset, step->length, sizes[CL_INPUT]);
    case CL_RECV_COPY:
    case CL_RECV_REDUCE:
        return encoded <= UINT32_MAX && !keeps;
    case CL_COPY:
        return step->source == CL_SCRATCH && step->target != CL_STAGING && !keeps &&
               range_fits(step->source_offset, encoded, sizes[CL_SCRATCH]);
    case CL_ENCODE:
        return step->target == CL_SCRATCH && step->source != CL_STAGING &&
               range_fits(step->target_offset, encoded, sizes[CL_SCRATCH]) &&
               (!keeps || (step->factor > 0 && range_fits(step->source_offset, step->length, sizes[CL_INPUT])));
    default:
        return false;
    }
}

static bool step_is_valid(const struct cl_step *step, const struct cl_plan *plan, const uint64_t sizes[4])
{
    if (step->kind > CL_CHECK || (step->flags & 0xff & ~(CL_STEP_PARTIAL | CL_STEP_KEEP)) != 0 ||
        step->flags >> 8 > CL_CODECS || step->source > CL_STAGING || step->target > CL_STAGING)
        return false;
    const struct cl_codec *codec = cl_step_codec(step);
    if (codec != NULL ? !codec_is_valid(step, codec, sizes) : step->kind == CL_ENCODE || step->flags & CL_STEP_KEEP)
        return false;
    if (step->kind == CL_SCALE ? step->peer == 0 : step->peer >= plan->world_size)
        return false;
    bool network = step->kind == CL_SEND || step->kind == CL_RECV_COPY || step->kind == CL_RECV_REDUCE;
    if (step->flags & CL_STEP_PARTIAL && !network)
        return false;
    if (network && (step->length > UINT32_MAX || step->peer == plan->rank))
        return false;
    if (network && ((step->kind == CL_SEND ? step->source : step->target) == CL_STAGING))
        return false; /* staging belongs to the host phase; `peer` would be ambiguous */
    if (step->kind == CL_SCALE && step->target == CL_STAGING)
        return false; /* likewise: in CL_SCALE, `peer` is the divisor */
    if (step->kind == CL_TELL || step->kind == CL_CHECK)
        return range_fits(step->kind == CL_TELL ? step->target_offset : step->source_offset, sizeof(uint64_t),
                          sizes[CL_STAGING]) &&
               (step->kind == CL_CHECK || step->peer == plan->rank);
    bool reads_encoded = codec != NULL && step->kind != CL_ENCODE, writes_encoded = step->kind == CL_ENCODE;
    if (cl_step_reads(step->kind) && !reads_encoded &&
        !range_fits(step->source_offset, step->length, sizes[step->source]))
        return false;
    return !cl_step_writes(step->kind) || writes_encoded ||
           range_fits(step->target_offset, step->length, sizes[step->target]);
}

/* Kahn's algorithm: every step must become ready exactly when its declared number of dependencies has ended; else
 * CL_EINVAL. Or CL_ENOMEM. */
static int check_order(const struct cl_plan *plan, uint32_t successor_count)
{
    int status = CL_ENOMEM;
    uint32_t *pending = calloc((size_t)plan->step_count + 1, sizeof *pending);
    uint32_t *queue = calloc((size_t)plan->step_count + 1, sizeof *queue);
    if (pending == NULL || queue == NULL)
        goto out;
    status = CL_EINVAL;
    uint32_t head = 0, tail = 0;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct cl_step *step = &plan->steps[i];
        if (!range_fits(step->successor_first, step->successor_count, successor_count))
            goto out;
        pending[i] = step->dependencies;
        if (pending[i] == 0)
            queue[tail++] = i;
    }
    while (head < tail) {
        const struct cl_step *step = &plan->steps[queue[head++]];
        for (uint32_t j = 0; j < step->successor_count; j++) {
            uint32_t next = plan->successors[step->successor_first + j];
            if (next >= plan->step_count || pending[next] == 0)
                goto out;
            if (--pending[next] == 0)
                queue[tail++] = next;
        }
    }
    status = tail == plan->step_count ? CL_OK : CL_EINVAL;
out:
    free(pending);
    free(queue);
    return status;
}

static bool names_host_rank(const struct cl_step *step)
{
    return step->kind == CL_AWAIT || step->kind == CL_TELL || step->kind == CL_CHECK ||
           (cl_step_reads(step->kind) && step->source == CL_STAGING) ||
           (cl_step_writes(step->kind) && step->target == CL_STAGING);
}

/* Collects host_ranks, each once. False when there is no memory. */
static bool find_host_ranks(struct cl_plan *plan)
{
    bool *found = calloc(plan->world_size, sizeof *found);
    plan->host_ranks = calloc(plan->world_size, sizeof *plan->host_ranks);
    if (found != NULL && plan->host_ranks != NULL) {
        for (uint32_t i = 0; i < plan->step_count; i++) {
            uint32_t rank = plan->steps[i].peer;
            if (!names_host_rank(&plan->steps[i]) || found[rank])
                continue;
            found[rank] = true;
            plan->host_ranks[plan->host_rank_count++] = rank;
        }
    }
    bool complete = found != NULL && plan->host_ranks != NULL;
    free(found);
    return complete;
}

/* False when there is no memory. */
static bool find_mutual(struct cl_plan *plan)
{
    bool *heard = calloc(plan->world_size, sizeof *heard);
    if (heard == NULL)
        return false;
    plan->mutual = plan->network_steps > 0;
    for (uint32_t i = 0; i < plan->step_count; i++)
        if (plan->steps[i].kind == CL_RECV_COPY || plan->steps[i].kind == CL_RECV_REDUCE)
            heard[plan->steps[i].peer] = true;
    for (uint32_t i = 0; i < plan->step_count; i++)
        plan->mutual &= plan->steps[i].kind != CL_SEND || heard[plan->steps[i].peer];
    free(heard);
    return true;
}

static bool inspect(struct cl_plan *plan, const uint64_t sizes[4])
{
    for (uint32_t i = 0; i < plan->step_count; i++) {
        const struct cl_step *step = &plan->steps[i];
        if (!step_is_valid(step, plan, sizes))
            return false;
        if (step->kind <= CL_RECV_REDUCE)
            plan->network_steps++;
        if (step->kind == CL_SEND)
            plan->sent_bytes += step->length;
        if (step->kind == CL_POST) {
            if (step->message == 0 || step->message > CL_POSTS_LIMIT)
                return false;
            plan->posts = step->message > plan->posts ? step->message : plan->posts;
        }
        if (step->kind == CL_POST || names_host_rank(step))
            plan->uses_host = true;
        plan->encodes |= step->flags >> 8 != 0;
        uint64_t end = step->target_offset + step->length;
        if (cl_step_writes(step->kind) && step->kind != CL_ENCODE && step->target == CL_OUTPUT &&
            end > plan->output_bytes)
            plan->output_bytes = end;
        if (cl_step_reads(step->kind) && step->source == CL_STAGING && step->peer != plan->rank)
            plan->shared_bytes += step->length;
        if (step->dependencies == 0)
            plan->roots[plan->root_count++] = i;
    }
    return true;
}

int cl_plan_create(const struct cl_plan_options *options, cl_plan **out)
{
    uint32_t step_count = options->step_count, successor_count = options->successor_count;
    if (out == NULL || options->rank >= options->world_size || (step_count > 0 && options->steps == NULL) ||
        (successor_count > 0 && options->successors == NULL))
        return CL_EINVAL;
    *out = NULL;
    struct cl_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return CL_ENOMEM;
    atomic_init(&plan->references, 1);
    plan->rank = options->rank;
    plan->world_size = options->world_size;
    plan->signature = options->signature;
    plan->step_count = step_count;
    plan->scratch_bytes = options->scratch_bytes;
    plan->staging_bytes = options->staging_bytes;
    plan->steps = calloc((size_t)step_count + 1, sizeof *plan->steps);
    plan->successors = calloc((size_t)successor_count + 1, sizeof *plan->successors);
    plan->roots = calloc((size_t)step_count + 1, sizeof *plan->roots);
    if (plan->steps == NULL || plan->successors == NULL || plan->roots == NULL) {
        cl_plan_release(plan);
        return CL_ENOMEM;
    }
    if (step_count > 0)
        memcpy(plan->steps, options->steps, step_count * sizeof *plan->steps);
    if (successor_count > 0)
        memcpy(plan->successors, options->successors, successor_count * sizeof *plan->successors);
    const uint64_t sizes[4] = {options->input_bytes, options->output_bytes, options->scratch_bytes,
                               options->staging_bytes};
    int status = inspect(plan, sizes) ? check_order(plan, successor_count) : CL_EINVAL;
    if (status == CL_OK && (!find_mutual(plan) || !find_host_ranks(plan)))
        status = CL_ENOMEM;
    if (status == CL_OK)
        *out = plan;
    else
        cl_plan_release(plan);
    return status;
}

void cl_plan_retain(struct cl_plan *plan)
{
    atomic_fetch_add(&plan->references, 1);
}

void cl_plan_release(cl_plan *plan)
{
    if (plan == NULL || atomic_fetch_sub(&plan->references, 1) != 1)
        return;
    free(plan->steps);
    free(plan->successors);
    free(plan->roots);
    free(plan->host_ranks);
    free(plan);
}
