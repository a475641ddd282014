#include "sim/account.h"

#include <string.h>

#include "kernels/reduce.h"
#include "protocol/endpoint_state.h"
#include "protocol/partial.h"
#include "sim/data.h"
#include "sim/element.h"
#include "sim/memory.h"
#include "sim/rank.h"

/* A partial send loses whole packets, none of them protected, and no more than its loss budget. */
static void check_message(struct sim_world *world, const struct sim_operation *operation, const struct cl_step *step)
{
    const struct cl_qos *qos = &world->scenario->calls[operation->call].qos;
    const struct cl_group *group = &operation->member->group;
    uint16_t peer = world->scenario->groups[world->scenario->calls[operation->call].group].members[step->peer];
    uint64_t payload = cl_peer_list_find(&group->endpoint->peers, peer)->payload_bytes;
    uint32_t packets = (uint32_t)((step->length + payload - 1) / payload), lost = 0;
    uint64_t lost_bytes = 0, end = step->source_offset + step->length;
    for (uint32_t i = 0; i < operation->operation.missing.uncounted.count; i++) {
        const struct cl_range *range = &operation->operation.missing.uncounted.list[i];
        uint64_t from = range->start > step->source_offset ? range->start : step->source_offset;
        uint64_t to = range->end < end ? range->end : end;
        if (from >= to)
            continue;
        uint64_t first = (from - step->source_offset) / payload,
                 after = (to - step->source_offset + payload - 1) / payload;
        bool whole =
            (from - step->source_offset) % payload == 0 && ((to - step->source_offset) % payload == 0 || to == end);
        if (!whole || first < qos->protect_first || after + qos->protect_last > packets)
            sim_world_fail(world, "call %u of rank %u lost bytes %llu to %llu of INPUT: parts of packets, or protected",
                           operation->call, operation->member->rank->id, (unsigned long long)from,
                           (unsigned long long)to);
        lost += (uint32_t)(after - first);
        lost_bytes += to - from;
    }
    if (lost > cl_partial_loss_budget(packets, qos->loss_bound))
        sim_world_fail(world, "call %u of rank %u lost %u of %u packets; its loss bound is %g", operation->call,
                       operation->member->rank->id, lost, packets, qos->loss_bound);
    world->counts.lost_bytes += lost_bytes;
}

void sim_account_keep(struct sim_world *world, struct sim_operation *operation)
{
    const struct sim_shape *shape = &world->plans->shapes[operation->shape];
    const struct sim_part *part = sim_plans_part(world->plans, shape, operation->member->group.rank);
    const struct cl_step *steps = sim_plans_steps(world->plans, part);
    for (uint32_t i = 0; i < part->step_count; i++)
        if (steps[i].kind == CL_SEND && steps[i].flags & CL_STEP_PARTIAL)
            check_message(world, operation, &steps[i]);
    operation->result = sim_new(operation->output_bytes, 1);
    memcpy(operation->result, operation->output, operation->output_bytes);
}

uint64_t sim_account_absent(const struct sim_operation *operation)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < operation->operation.missing.absent_count; i++)
        bytes += operation->operation.missing.absent[i].end - operation->operation.missing.absent[i].start;
    return bytes;
}

/* Adds 1 to the number of each element in a range of bytes. */
static void count(uint32_t *numbers, const struct cl_range *range, uint64_t offset, size_t element)
{
    for (uint64_t at = offset + range->start; at < offset + range->end; at += element)
        numbers[at / element]++;
}

/* One rank's operation of a call. */
static const struct sim_operation *part_of(const struct sim_world *world, uint32_t call, uint32_t self)
{
    const struct sim_group *group = &world->scenario->groups[world->scenario->calls[call].group];
    return &world->ranks[group->members[self]].operations[call];
}

void sim_account_check(struct sim_world *world, uint32_t call)
{
    const struct sim_call *what = &world->scenario->calls[call];
    const struct sim_shape *shape = &world->plans->shapes[what->shape];
    size_t element = cl_dtype_size(what->dtype), elements = shape->input_bytes / element;
    for (uint32_t rank = 0; rank < shape->world; rank++)
        if (part_of(world, call, rank)->result == NULL)
            return; /* failed on this rank; other ranks may have succeeded */
    /* by element of INPUT: contributions counted as lost by their senders, and by their owners */
    uint32_t *lost = sim_new(elements, sizeof *lost), *absent = sim_new(elements, sizeof *absent);
    int64_t *sums = sim_new(elements, sizeof *sums);
    for (uint32_t rank = 0; rank < shape->world; rank++) {
        const struct sim_operation *operation = part_of(world, call, rank);
        const struct sim_part *part = sim_plans_part(world->plans, shape, rank);
        const struct sim_clause *clause = sim_plans_clauses(world->plans, part);
        uint32_t *own = sim_new(elements, sizeof *own);
        for (uint32_t i = 0; i < operation->operation.missing.uncounted.count; i++)
            count(own, &operation->operation.missing.uncounted.list[i], 0, element);
        for (uint32_t i = 0; i < operation->operation.missing.absent_count; i++)
            count(absent, &operation->operation.missing.absent[i], clause->source - clause->target, element);
        for (size_t i = 0; i < elements; i++) {
            lost[i] += own[i];
            if (own[i] == 0)
                sums[i] = sim_element_reduce(what->dtype, CL_SUM, sums[i], sim_data_value(world, call, rank, i));
        }
        free(own);
    }
    if (memcmp(lost, absent, elements * sizeof *lost) != 0)
        sim_world_fail(world, "senders and receivers of call %u disagree on what was lost", call);
    uint8_t *expected = sim_new(shape->input_bytes, 1);
    for (size_t i = 0; i < elements; i++) {
        uint32_t counted = what->qos.treatment == CL_RESCALE ? shape->world - lost[i] : shape->world;
        sim_element_write(what->dtype, expected + i * element, sums[i], shape->average ? counted : 1);
    }
    for (uint32_t rank = 0; rank < shape->world; rank++) {
        const struct sim_part *part = sim_plans_part(world->plans, shape, rank);
        const struct sim_clause *clauses = sim_plans_clauses(world->plans, part);
        for (uint32_t i = 0; i < part->clause_count; i++)
            if (sim_element_difference(what->dtype, part_of(world, call, rank)->result + clauses[i].target,
                                       expected + clauses[i].source, clauses[i].length) < clauses[i].length)
                sim_world_fail(world, "rank %u has a result of call %u that is not the sum of what was counted",
                               part_of(world, call, rank)->member->rank->id, call);
    }
    free(lost);
    free(absent);
    free(sums);
    free(expected);
}
