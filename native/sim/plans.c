#include "sim/plans.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim/memory.h"

_Static_assert(sizeof(struct sim_plans_head) == 40 && sizeof(struct sim_layout) == 24 &&
                   sizeof(struct sim_shape) == 104 && sizeof(struct sim_part) == 56 &&
                   sizeof(struct sim_clause) == 32 && sizeof(struct cl_step) == 64,
               "the records that plans.py writes");

const char *sim_plans_open(struct sim_plans *plans, const char *path)
{
    *plans = (struct sim_plans){0};
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return "cannot be opened: `make build/plans.bin` writes it; that needs Python with numpy";
    struct stat status;
    const char *problem = NULL;
    void *bytes = MAP_FAILED;
    if (fstat(file, &status) == 0 && (size_t)status.st_size >= sizeof(struct sim_plans_head))
        bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (bytes == MAP_FAILED)
        return "is empty or cannot be mapped: remove it, and run make again";
    plans->bytes = bytes;
    plans->length = (size_t)status.st_size;
    plans->head = bytes;
    const struct sim_plans_head *head = plans->head;
    if (memcmp(head->magic, "CLPLANS", 8) != 0 || head->version != SIM_PLANS_VERSION || head->layout_count == 0 ||
        head->layouts_at + head->layout_count * sizeof(struct sim_layout) > plans->length ||
        head->shapes_at + head->shape_count * sizeof(struct sim_shape) > plans->length)
        problem = "is not a file of plans of this version: remove it, and run make again";
    if (problem != NULL) {
        munmap(bytes, plans->length);
        *plans = (struct sim_plans){0};
        return problem;
    }
    plans->layouts = (const struct sim_layout *)(const void *)(plans->bytes + head->layouts_at);
    plans->shapes = (const struct sim_shape *)(const void *)(plans->bytes + head->shapes_at);
    plans->loaded = sim_new(head->shape_count, sizeof *plans->loaded);
    return NULL;
}

void sim_plans_close(struct sim_plans *plans)
{
    if (plans->bytes == NULL)
        return;
    for (uint32_t shape = 0; shape < plans->head->shape_count; shape++) {
        for (uint32_t rank = 0; plans->loaded[shape] != NULL && rank < plans->shapes[shape].world; rank++)
            cl_plan_release(plans->loaded[shape][rank]);
        free(plans->loaded[shape]);
    }
    free(plans->loaded);
    munmap((void *)(uintptr_t)plans->bytes, plans->length);
    *plans = (struct sim_plans){0};
}

uint64_t sim_plans_payload(const struct sim_plans *plans, const struct sim_shape *shape, uint64_t *messages)
{
    uint64_t bytes = 0;
    *messages = 0;
    for (uint32_t rank = 0; rank < shape->world; rank++) {
        const struct sim_part *part = sim_plans_part(plans, shape, rank);
        const struct cl_step *steps = sim_plans_steps(plans, part);
        for (uint32_t i = 0; i < part->step_count; i++) {
            if (steps[i].kind != CL_SEND)
                continue;
            bytes += steps[i].length;
            (*messages)++;
        }
    }
    return bytes;
}

cl_plan *sim_plans_load(struct sim_plans *plans, uint32_t shape_index, uint32_t rank)
{
    const struct sim_shape *shape = &plans->shapes[shape_index];
    if (plans->loaded[shape_index] == NULL)
        plans->loaded[shape_index] = sim_new(shape->world, sizeof *plans->loaded[shape_index]);
    cl_plan **loaded = &plans->loaded[shape_index][rank];
    if (*loaded != NULL)
        return *loaded;
    const struct sim_part *part = sim_plans_part(plans, shape, rank);
    const void *successors = plans->bytes + part->successors_at;
    struct cl_plan_options options = {.steps = sim_plans_steps(plans, part),
                                      .step_count = part->step_count,
                                      .successors = successors,
                                      .successor_count = part->successor_count,
                                      .rank = rank,
                                      .world_size = shape->world,
                                      .input_bytes = shape->input_bytes,
                                      .output_bytes = shape->output_bytes,
                                      .scratch_bytes = part->scratch_bytes,
                                      .staging_bytes = part->staging_bytes,
                                      .signature = shape_index + 1};
    return cl_plan_create(&options, loaded) == CL_OK ? *loaded : NULL;
}
