/*
 * Loopback: what the whole engine carries over real sockets: engines of this process, 2 to 4, exchange and add floats
 * over 127.0.0.1, as an all-reduce between hosts does. Compare it with the floor (floor.c).
 *
 *   loopback [DATAGRAM_BYTES [SECONDS [RANKS]]]
 *
 * Prints Gbit/s of payload each way per second of one engine thread's processor time, which depends less on other load
 * than the time of a clock, that too, and how packets were batched.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tests/world.h"

enum { MESSAGES = 10, MESSAGE_BYTES = 128 << 10, BYTES = MESSAGES * MESSAGE_BYTES };

/* Each message goes to every other rank. */
static cl_plan *plan_of(uint32_t rank, uint32_t ranks)
{
    struct draft draft = {.rank = rank, .world_size = ranks, .input_bytes = BYTES, .output_bytes = BYTES};
    for (uint32_t i = 0; i < MESSAGES; i++)
        for (uint32_t other = 1; other < ranks; other++) {
            struct cl_step step = {.kind = CL_SEND,
                                   .peer = (rank + other) % ranks,
                                   .length = MESSAGE_BYTES,
                                   .source_offset = (uint64_t)i * MESSAGE_BYTES,
                                   .message = i,
                                   .target_offset = (uint64_t)i * MESSAGE_BYTES};
            draft_add(&draft, step, DRAFT_NONE);
            step.kind = CL_RECV_REDUCE;
            step.target = CL_OUTPUT;
            draft_add(&draft, step, DRAFT_NONE);
        }
    return draft_finish(&draft);
}

static double cpu_s(cl_engine *engine)
{
    clockid_t clock;
    struct timespec time;
    pthread_getcpuclockid(engine->thread, &clock);
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int count, char **arguments)
{
    struct cl_engine_options options = options_of("udp", 0);
    options.datagram_bytes = count > 1 ? (uint32_t)atoi(arguments[1]) : 1472;
    uint32_t ranks = count > 3 ? (uint32_t)atoi(arguments[3]) : 4;
    double seconds = count > 2 ? atof(arguments[2]) : 2;
    struct world world = open_world_of(ranks, options);
    cl_group *groups[RANKS_MAX];
    cl_plan *plans[RANKS_MAX];
    float *inputs[RANKS_MAX], *outputs[RANKS_MAX];
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct cl_group_options group = group_options(&world, 1, rank, -1);
        CHECK_EQ(cl_group_open(world.engines[rank], &group, &groups[rank]), CL_OK);
        CHECK((plans[rank] = plan_of(rank, ranks)) != NULL);
        inputs[rank] = calloc(1, BYTES);
        outputs[rank] = calloc(1, BYTES);
    }
    struct cl_engine_stats start = {0}, end = {0};
    double start_cpu_s = 0;
    uint64_t start_us = 0, bytes = 0;
    for (uint32_t call = 0; call < 8 || (double)(cl_now_us() - start_us) < seconds * 1e6; call++) {
        if (call == 7) { /* warm */
            cl_engine_read_stats(world.engines[0], &start);
            start_cpu_s = cpu_s(world.engines[0]);
            start_us = cl_now_us();
            bytes = 0;
        }
        cl_operation *operations[RANKS_MAX];
        for (uint32_t rank = 0; rank < ranks; rank++) {
            struct cl_operation_request request = {.plan = plans[rank],
                                                   .input = inputs[rank],
                                                   .output = outputs[rank],
                                                   .dtype = CL_F32,
                                                   .op = CL_SUM,
                                                   .qos = {.priority = 4},
                                                   .timeout_us = PATIENCE_US};
            CHECK_EQ(cl_submit(groups[rank], &request, &operations[rank]), CL_OK);
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            CHECK_EQ(cl_operation_wait(operations[rank], 0), CL_OK);
            cl_operation_release(operations[rank]);
        }
        bytes += (ranks - 1) * BYTES;
    }
    double wall_s = (double)(cl_now_us() - start_us) / 1e6, used_s = cpu_s(world.engines[0]) - start_cpu_s;
    cl_engine_read_stats(world.engines[0], &end);
    double acks = (double)(end.acks_sent - start.acks_sent);
    double packets = (double)(end.packets_sent - start.packets_sent) - acks;
    printf("loopback, %u ranks, datagrams of %u: %.1f Gbit/s each way per second of CPU, %.1f by the clock, %.0f ns "
           "per packet "
           "both ways, %.1f packets per send call, %.1f per receive call, %.1f per ack, lost %.2f %%\n",
           ranks, options.datagram_bytes, (double)bytes * 8 / used_s / 1e9, (double)bytes * 8 / wall_s / 1e9,
           used_s / packets * 1e9, packets / (double)(end.send_calls - start.send_calls),
           packets / (double)(end.receive_calls - start.receive_calls), packets / acks,
           100 * (double)(end.packets_lost - start.packets_lost) / packets);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        cl_group_close(groups[rank]);
        cl_plan_release(plans[rank]);
        free(inputs[rank]);
        free(outputs[rank]);
    }
    close_world(&world);
    return 0;
}
