#include "sim/report.h"

#include "sim/element.h"
#include "sim/queue.h"

static void print_call(const struct sim_scenario *scenario, const struct sim_plans *plans, uint32_t number, FILE *file)
{
    const struct sim_call *call = &scenario->calls[number];
    fprintf(file, "  call %u at %.6f: group %u, priority %u, ", number, (double)call->at_ns / 1e9, call->group + 1,
            call->qos.priority);
    if (call->kind == SIM_CALL_MESSAGE) {
        fprintf(file, "%u bytes from %u to %u%s, tag %u, after call %d\n", call->length, call->from, call->to,
                call->any_source ? " (any source)" : "", call->tag, (int)call->after);
        return;
    }
    const struct sim_shape *shape = &plans->shapes[call->shape];
    fprintf(file, "%s of %llu x %s%s, op %d%s, %s%s, encoding %u, loss bound %g\n", shape->collective,
            (unsigned long long)shape->numel, sim_element_name(call->dtype), call->nan ? " with NaN" : "",
            (int)call->op, shape->average ? " averaged" : "", shape->algorithm,
            shape->deterministic ? ", deterministic" : "", shape->encoded, call->qos.loss_bound);
}

void sim_report_scenario(const struct sim_scenario *scenario, const struct sim_plans *plans, FILE *file)
{
    fprintf(file, "seed %llu: a story of %s: %u ranks on %u hosts, %u paths%s\n", (unsigned long long)scenario->seed,
            sim_story_name(scenario->story), scenario->world, scenario->hosts, scenario->paths,
            scenario->trunks ? " over two switches" : "");
    for (uint32_t i = 0; i < scenario->paths; i++)
        fprintf(file, "  path %u: %.4g Mbit/s, %.4g us\n", i, scenario->rates_bps[i] / 1e6,
                (double)scenario->delays_ns[i] / 1e3);
    fprintf(file, "  queues: %s, %u packets; jitter %.4g us; socket buffers %llu bytes; full wire %.3g\n",
            scenario->queue->name, scenario->queue_packets, (double)scenario->jitter_ns / 1e3,
            (unsigned long long)scenario->socket_bytes, scenario->full_chance);
    const struct sim_noise *noise = &scenario->noise;
    fprintf(
        file,
        "  noise: loss %.4g, bursts %.4g of %.4g us and %.3g, reordering %.4g by %.4g us, duplicates %.4g, flips %.4g",
        noise->loss, noise->burst_begin, (double)noise->burst_ns / 1e3, noise->burst_loss, noise->reorder,
        (double)noise->reorder_ns / 1e3, noise->duplicate, noise->corrupt);
    if (scenario->noisy_host != UINT32_MAX)
        fprintf(file, ", at host %u only", scenario->noisy_host);
    fprintf(file,
            "\n  %s authenticated, datagrams of %u bytes, %llu bytes for unexpected packets, peer "
            "timeout %.3g s, "
            "operations %.4g s\n",
            scenario->auth == CL_AUTH_FULL ? "all of a packet" : "headers", scenario->datagram_bytes,
            (unsigned long long)scenario->unexpected_limit_bytes, (double)scenario->peer_timeout_us / 1e6,
            (double)scenario->timeout_us / 1e6);
    sim_wiring_print(&scenario->wiring, scenario->world, file);
    for (uint32_t i = 0; i < scenario->group_count; i++) {
        fprintf(file, "  group %u:", i + 1);
        for (uint32_t rank = 0; rank < scenario->groups[i].size && rank < 16; rank++)
            fprintf(file, " %u@%u", scenario->groups[i].members[rank],
                    scenario->host_of[scenario->groups[i].members[rank]]);
        fprintf(file, "%s%s%s%s\n", scenario->groups[i].size > 16 ? " ..." : "",
                scenario->groups[i].opens ? ", opens with its first call" : "",
                scenario->groups[i].closes ? ", closes after its last" : "",
                scenario->groups[i].revives ? ", its ranks meet again" : "");
    }
    for (uint32_t i = 0; i < scenario->call_count; i++)
        print_call(scenario, plans, i, file);
    for (uint32_t i = 0; i < scenario->fault_count; i++) {
        const struct sim_fault *fault = &scenario->faults[i];
        fprintf(file, "  fault at %.6f for %.6f: %s, a %u, b %u, path %u, amount %g\n", (double)fault->at_ns / 1e9,
                (double)fault->for_ns / 1e9, sim_fault_name(fault->kind), fault->a, fault->b, fault->path,
                fault->amount);
    }
    fprintf(file, "  up to %u calls in flight; all must have ended at %.3f\n", scenario->depth,
            (double)scenario->limit_ns / 1e9);
}
