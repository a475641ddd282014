#include "sim/data.h"

#include "kernels/reduce.h"
#include "sim/element.h"
#include "sim/memory.h"

enum { NAN_EVERY = 101 /* elements of a call with NaN */ };

static const struct sim_shape *shape_of(const struct sim_world *world, uint32_t call)
{
    return &world->plans->shapes[world->scenario->calls[call].shape];
}

int64_t sim_data_value(const struct sim_world *world, uint32_t call, uint32_t rank, uint64_t index)
{
    const struct sim_call *what = &world->scenario->calls[call];
    const struct sim_shape *shape = shape_of(world, call);
    /* numbers whose sums are exact in 16 bits */
    enum cl_dtype dtype = shape->encoded == SIM_ENCODED_16 ? CL_BF16 : what->dtype;
    uint64_t hash = what->nan ? sim_mix(world->scenario->seed + call + sim_mix(index << 16 | rank)) : 1;
    if (hash % NAN_EVERY == 0)
        return hash / NAN_EVERY % 2 ? SIM_NAN : SIM_NAN_LOW;
    return sim_element_value(dtype, what->op, shape->world, rank, world->scenario->seed + call, index);
}

void sim_data_fill(const struct sim_world *world, uint32_t call, uint32_t rank, uint8_t *input, uint64_t bytes)
{
    enum cl_dtype dtype = world->scenario->calls[call].dtype;
    size_t size = cl_dtype_size(dtype);
    for (uint64_t i = 0; i < bytes / size; i++)
        sim_element_write(dtype, input + i * size, sim_data_value(world, call, rank, i), 1);
}

uint8_t *sim_data_reduce(const struct sim_world *world, uint32_t call)
{
    const struct sim_shape *shape = shape_of(world, call);
    const struct sim_call *what = &world->scenario->calls[call];
    size_t size = cl_dtype_size(what->dtype);
    uint8_t *reduced = sim_new(shape->input_bytes, 1);
    for (uint64_t i = 0; i < shape->input_bytes / size; i++) {
        int64_t value = sim_data_value(world, call, 0, i);
        for (uint32_t rank = 1; rank < shape->world; rank++)
            value = sim_element_reduce(what->dtype, what->op, value, sim_data_value(world, call, rank, i));
        sim_element_write(what->dtype, reduced + i * size, value, shape->average ? shape->world : 1);
    }
    return reduced;
}

uint8_t sim_data_byte(const struct sim_world *world, const struct sim_call *call, uint32_t from, uint32_t number,
                      uint32_t at)
{
    uint64_t message = (uint64_t)call->group << 56 | (uint64_t)from << 40 | (uint64_t)call->to << 24 | call->tag;
    return (uint8_t)sim_mix(sim_mix(message + world->scenario->seed) + ((uint64_t)number << 32 | at));
}
