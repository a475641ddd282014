#include "plan/missing.h"

#include <stdlib.h>

#include "protocol/array.h"

static bool add_absent(struct cl_missing *missing, uint64_t start, uint64_t end)
{
    if (!cl_array_reserve(&missing->absent, missing->absent_count, &missing->absent_capacity, sizeof *missing->absent))
        return false;
    missing->absent[missing->absent_count++] = (struct cl_range){start, end};
    return true;
}

struct cl_range cl_step_values(const struct cl_step *step, const struct cl_codec *codec, const struct cl_range *encoded)
{
    uint64_t value_bytes = codec->block_values * sizeof(float);
    uint64_t end = encoded->end / codec->block_bytes * value_bytes;
    return (struct cl_range){encoded->start / codec->block_bytes * value_bytes,
                             end < step->length ? end : step->length};
}

bool cl_missing_add(struct cl_missing *missing, const struct cl_step *step, const struct cl_range *ranges,
                    uint32_t count)
{
    bool noted = true;
    const struct cl_codec *codec = cl_step_codec(step);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t base = step->kind == CL_SEND && codec == NULL ? step->source_offset : step->target_offset;
        struct cl_range range = codec == NULL ? ranges[i] : cl_step_values(step, codec, &ranges[i]);
        uint64_t start = base + range.start, end = base + range.end;
        if (step->kind == CL_SEND && (step->source == CL_INPUT || codec != NULL))
            noted &= cl_ranges_add(&missing->uncounted, start, end);
        else if (step->kind == CL_RECV_COPY && step->target == CL_OUTPUT)
            noted &= cl_ranges_add(&missing->stale, start, end);
        else if (step->kind == CL_RECV_REDUCE && step->target == CL_OUTPUT)
            noted &= add_absent(missing, start, end);
    }
    return noted;
}

uint32_t cl_missing_next(const struct cl_missing *missing, uint64_t *at, uint64_t end)
{
    uint64_t start = *at;
    uint32_t absent = 0;
    *at = end;
    for (uint32_t i = 0; i < missing->absent_count; i++) {
        const struct cl_range *range = &missing->absent[i];
        absent += range->start <= start && start < range->end;
        if (range->start > start && range->start < *at)
            *at = range->start;
        else if (range->start <= start && range->end > start && range->end < *at)
            *at = range->end;
    }
    return absent;
}

void cl_missing_free(struct cl_missing *missing)
{
    cl_ranges_free(&missing->uncounted);
    cl_ranges_free(&missing->stale);
    free(missing->absent);
    *missing = (struct cl_missing){0};
}
