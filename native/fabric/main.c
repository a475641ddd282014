/*
 * One run on a leaf-spine fabric: collectives by DLCP (the production endpoint) or by DCTCP, with background traffic by
 * DCTCP. Prints one line of JSON: the times of messages and collectives. bench/fabric.py runs it; docs/fabric.md has
 * the results.
 *
 *     fabric --plans FILE --shapes N,N,... [--transport dlcp|dctcp] [--seed N] ... (see `options`)
 *
 * A round is the traffic of one training step: the shapes, from the last layers to the first, `gap` apart; later shapes
 * are more urgent. Rounds follow one another. The first lets congestion control settle and is not measured.
 */
#include <inttypes.h>
#include <string.h>

#include "congestion/congestion.h"
#include "fabric/background.h"
#include "fabric/dlcp.h"
#include "fabric/job.h"
#include "sim/memory.h"

enum { SHAPES_MAX = 32, START_NS = 1000000, MARGIN_NS = 1000000, PROTOCOL_DLCP = 0, PROTOCOL_DCTCP = 1 };

struct options {
    const char *plans, *shapes, *transport, *rate_control;
    double seed, rounds, mtu, paths, tick_ns, sprays, priorities, selective, credit_kib, unscheduled_kib, loss_bound,
        load, leaves, hosts_per_leaf, others_per_leaf, spines, host_gbps, spine_gbps, delay_us, port_kib, switch_kib,
        mark_us, rto_us, gap_us, skew_us, limit_ms;
};

static const struct option {
    const char *name;
    size_t at;
    bool text;
    const char *what;
} OPTIONS[] = {
#define NUMBER(name, what)                                                                                             \
    {                                                                                                                  \
#name, offsetof(struct options, name), false, what                                                             \
    }
#define TEXT(name, what)                                                                                               \
    {                                                                                                                  \
#name, offsetof(struct options, name), true, what                                                              \
    }
    TEXT(plans, "file written by native/sim/plans.py"),
    TEXT(shapes, "indices of the shapes of a round"),
    TEXT(transport, "dlcp or dctcp"),
    TEXT(rate_control, "dlcp: delay or fixed"),
    NUMBER(seed, "of all random choices"),
    NUMBER(rounds, "measured, after one that is not"),
    NUMBER(mtu, "bytes of an IP packet"),
    NUMBER(paths, "dlcp: per peer"),
    NUMBER(tick_ns, "dlcp: length of the endpoint's microsecond"),
    NUMBER(sprays, "dlcp: 1: the switches choose a spine for each packet, 0: for each path"),
    NUMBER(priorities, "dlcp: 0: one class for all"),
    NUMBER(selective, "dlcp: 0: switches do not drop droppable packets first"),
    NUMBER(credit_kib, "dlcp: that a host grants; 0: no credit; -1: derived"),
    NUMBER(unscheduled_kib, "dlcp: of each message, that leave without credit"),
    NUMBER(loss_bound, "dlcp: share of the packets that a partial message may lose"),
    NUMBER(load, "of the background, as share of the hosts' links"),
    NUMBER(leaves, ""),
    NUMBER(hosts_per_leaf, ""),
    NUMBER(others_per_leaf, "hosts that send the background"),
    NUMBER(spines, ""),
    NUMBER(host_gbps, ""),
    NUMBER(spine_gbps, "of one link between leaf and spine"),
    NUMBER(delay_us, "of one link"),
    NUMBER(port_kib, "limit of a port's queue"),
    NUMBER(switch_kib, "shared by the ports of a switch; 0: not shared"),
    NUMBER(mark_us, "queue of a class above which ECN marks"),
    NUMBER(rto_us, "dctcp: minimum"),
    NUMBER(gap_us, "between the calls of a round"),
    NUMBER(skew_us, "between the ranks' calls, at most"),
    NUMBER(limit_ms, "of virtual time"),
};

static void usage(const char *problem)
{
    fprintf(stderr, "fabric: %s\n", problem);
    for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++)
        fprintf(stderr, "    --%-16s %s\n", OPTIONS[i].name, OPTIONS[i].what);
    exit(2);
}

static void parse(struct options *options, int count, char **arguments)
{
    for (int i = 1; i < count; i += 2) {
        const struct option *option = NULL;
        for (size_t j = 0; j < sizeof OPTIONS / sizeof *OPTIONS; j++)
            if (strncmp(arguments[i], "--", 2) == 0 && strcmp(arguments[i] + 2, OPTIONS[j].name) == 0)
                option = &OPTIONS[j];
        if (option == NULL || i + 1 == count)
            usage(arguments[i]);
        char *value = arguments[i + 1], *end = value;
        if (option->text)
            *(const char **)(void *)((char *)options + option->at) = value;
        else
            *(double *)(void *)((char *)options + option->at) = strtod(value, &end);
        if (!option->text && (end == value || *end != 0))
            usage(arguments[i]);
    }
}

struct run {
    struct options options;
    struct sim_clock clock;
    struct sim_trace trace;
    struct sim_fabric fabric;
    struct sim_dlcp dlcp;
    struct sim_dctcp dctcp;
    struct sim_background background;
    struct sim_random random;
    struct sim_plans plans;
    uint32_t shapes[SHAPES_MAX], shape_count;
    struct sim_job *jobs; /* of all rounds */
    uint32_t round_count;
};

static void begin(struct run *run)
{
    const struct options *o = &run->options;
    const char *problem = sim_plans_open(&run->plans, o->plans != NULL ? o->plans : "");
    if (problem != NULL)
        usage(problem);
    for (const char *at = o->shapes; at != NULL && *at != 0 && run->shape_count < SHAPES_MAX; run->shape_count++) {
        char *end;
        run->shapes[run->shape_count] = (uint32_t)strtoul(at, &end, 10);
        if (end == at || run->shapes[run->shape_count] >= run->plans.head->shape_count)
            usage("there is no such shape in the plans");
        at = *end == ',' ? end + 1 : end;
    }
    struct sim_fabric_config config = {.leaves = (uint32_t)o->leaves,
                                       .hosts_per_leaf = (uint32_t)o->hosts_per_leaf,
                                       .others_per_leaf = (uint32_t)o->others_per_leaf,
                                       .spines = (uint32_t)o->spines,
                                       .host_bps = o->host_gbps * 1e9,
                                       .spine_bps = o->spine_gbps * 1e9,
                                       .delay_ns = (uint64_t)(o->delay_us * 1000),
                                       .port_bytes = (uint64_t)(o->port_kib * 1024),
                                       .switch_bytes = (uint64_t)(o->switch_kib * 1024),
                                       .mark_us = (uint64_t)o->mark_us};
    run->trace.clock = &run->clock;
    uint64_t seed = (uint64_t)o->seed;
    sim_fabric_init(&run->fabric, &config, &run->clock, &run->trace, seed);
    for (uint32_t i = 0; i < run->shape_count; i++)
        if (run->plans.shapes[run->shapes[i]].world != run->fabric.hosts)
            usage("the plans are for another number of hosts");
    struct sim_dlcp_config dlcp = {.mtu = (uint32_t)o->mtu,
                                   .paths = (uint32_t)o->paths,
                                   .tick_ns = (uint32_t)o->tick_ns,
                                   .sprays = o->sprays != 0,
                                   .priorities = o->priorities != 0,
                                   .credit_bytes =
                                       o->credit_kib < 0 ? CL_CREDIT_DERIVED : (uint64_t)(o->credit_kib * 1024),
                                   .unscheduled_bytes = (uint32_t)(o->unscheduled_kib * 1024),
                                   .rate_control = o->rate_control,
                                   .selective = o->selective != 0};
    if (cl_congestion_find(o->rate_control) == NULL)
        usage("there is no such rate control");
    sim_dlcp_init(&run->dlcp, &dlcp, &run->fabric, PROTOCOL_DLCP);
    sim_dctcp_init(&run->dctcp, &run->fabric, PROTOCOL_DCTCP, (uint32_t)o->mtu, (uint64_t)(o->rto_us * 1000));
    run->dlcp.transport.done = run->dctcp.transport.done = sim_job_done;
    sim_background_init(&run->background, &run->dctcp, o->load, seed, START_NS);
    run->random = sim_random_seeded(seed, 8);
    run->round_count = (uint32_t)o->rounds + 1;
    run->jobs = sim_new((size_t)run->round_count * run->shape_count, sizeof *run->jobs);
}

/* False when it takes longer than the limit. */
static bool run_round(struct run *run, uint32_t round)
{
    const struct options *o = &run->options;
    struct sim_transport *transport = strcmp(o->transport, "dctcp") == 0 ? &run->dctcp.transport : &run->dlcp.transport;
    struct sim_job *jobs = &run->jobs[round * run->shape_count];
    for (uint32_t i = 0; i < run->shape_count; i++) {
        /* The shape called last is needed first. */
        uint32_t priority = (run->shape_count - 1 - i) * SIM_CLASS_OTHERS / run->shape_count;
        sim_job_init(&jobs[i], &run->clock, transport, round * run->shape_count + i, &run->plans, run->shapes[i],
                     (uint8_t)priority, o->loss_bound);
    }
    uint64_t start_ns = run->clock.now_ns + MARGIN_NS;
    for (uint32_t rank = 0; rank < run->fabric.hosts; rank++) {
        uint64_t skew_ns = sim_random_below(&run->random, (uint64_t)(o->skew_us * 1000) + 1);
        for (uint32_t i = 0; i < run->shape_count; i++)
            sim_job_call(&jobs[i], rank, start_ns + skew_ns + (uint64_t)(o->gap_us * 1000) * i);
    }
    for (uint32_t i = 0; i < run->shape_count; i++)
        while (jobs[i].unfinished > 0)
            if (!sim_clock_step(&run->clock) || (double)run->clock.now_ns > o->limit_ms * 1e6)
                return false;
    return true;
}

/* ---- results ---- */

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void print_times(const char *name, uint64_t *times_ns, size_t count)
{
    qsort(times_ns, count, sizeof *times_ns, compare);
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)times_ns[i];
    printf("\"%s\": {\"count\": %zu", name, count);
    if (count > 0) {
        printf(", \"mean_us\": %.3f, \"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, \"max_us\": %.3f",
               sum / (double)count / 1e3, (double)times_ns[count / 2] / 1e3, (double)times_ns[count * 99 / 100] / 1e3,
               (double)times_ns[count * 999 / 1000] / 1e3, (double)times_ns[count - 1] / 1e3);
    }
    printf("}, ");
}

static void print_jobs(const struct run *run)
{
    uint32_t first = run->shape_count, end = run->round_count * run->shape_count;
    size_t messages = 0, ranks = 0;
    for (uint32_t i = first; i < end; i++)
        messages += run->jobs[i].message_count;
    uint64_t *times_ns = sim_new(messages, sizeof *times_ns),
             *collectives_ns = sim_new((size_t)(end - first) * run->fabric.hosts, sizeof *collectives_ns);
    uint64_t bytes = 0, missing = 0, rounds_ns = 0;
    size_t message = 0;
    for (uint32_t i = first; i < end; i++) {
        const struct sim_job *job = &run->jobs[i];
        bytes += job->bytes;
        missing += job->missing;
        memcpy(&times_ns[message], job->times_ns, job->message_count * sizeof *times_ns);
        message += job->message_count;
        for (uint32_t rank = 0; rank < run->fabric.hosts; rank++)
            collectives_ns[ranks++] = job->ranks[rank].ended_ns - job->ranks[rank].called_ns;
    }
    for (uint32_t round = 1; round < run->round_count; round++) {
        uint64_t called_ns = UINT64_MAX, ended_ns = 0;
        for (uint32_t i = 0; i < run->shape_count * run->fabric.hosts; i++) {
            const struct sim_job_rank *rank =
                &run->jobs[round * run->shape_count + i / run->fabric.hosts].ranks[i % run->fabric.hosts];
            called_ns = rank->called_ns < called_ns ? rank->called_ns : called_ns;
            ended_ns = rank->ended_ns > ended_ns ? rank->ended_ns : ended_ns;
        }
        rounds_ns += ended_ns - called_ns;
    }
    /* the shape called last is needed first: see run_round */
    uint64_t *urgent_ns = sim_new(ranks / run->shape_count, sizeof *urgent_ns);
    for (uint32_t round = 0; round + 1 < run->round_count; round++)
        memcpy(&urgent_ns[round * run->fabric.hosts],
               &collectives_ns[((round + 1) * run->shape_count - 1) * run->fabric.hosts],
               run->fabric.hosts * sizeof *urgent_ns);
    print_times("urgent", urgent_ns, ranks / run->shape_count);
    free(urgent_ns);
    print_times("messages", times_ns, messages);
    print_times("collectives", collectives_ns, ranks);
    double rounds = run->round_count - 1;
    printf("\"round_us\": %.3f, \"round_bytes\": %.0f, \"missing\": %.8f, ", (double)rounds_ns / rounds / 1e3,
           (double)bytes / rounds, bytes > 0 ? (double)missing / (double)bytes : 0);
    free(times_ns);
    free(collectives_ns);
}

static void print_background(const struct run *run)
{
    enum { SHORT_BYTES = 100000 };
    uint64_t *times_ns = sim_new(run->background.count, sizeof *times_ns), total = 0;
    size_t count = 0, ended = 0;
    for (const struct sim_background_flow *flow = run->background.last; flow != NULL; flow = flow->before) {
        ended += flow->ended_ns > 0;
        total += flow->bytes;
        if (flow->bytes <= SHORT_BYTES && flow->ended_ns > 0)
            times_ns[count++] = flow->ended_ns - flow->started_ns;
    }
    print_times("background_short", times_ns, count);
    printf("\"background_flows\": %u, \"background_ended\": %zu, \"background_bytes\": %" PRIu64 ", ",
           run->background.count, ended, total);
    free(times_ns);
}

static void print(const struct run *run)
{
    struct sim_fabric_counts counts = sim_fabric_count(&run->fabric);
    struct cl_engine_stats dlcp = sim_dlcp_stats(&run->dlcp);
    const struct sim_dctcp_counts *dctcp = &run->dctcp.counts;
    printf("{");
    print_jobs(run);
    print_background(run);
    printf("\"packets\": %" PRIu64 ", \"marked\": %" PRIu64 ", \"selected\": %" PRIu64 ", \"overflowed\": %" PRIu64
           ", \"most_port_bytes\": %" PRIu64 ", ",
           counts.sent, counts.marked, counts.selected, counts.overflowed, counts.most_port_bytes);
    printf("\"dlcp\": {\"sent\": %" PRIu64 ", \"again\": %" PRIu64 ", \"lost\": %" PRIu64 ", \"spurious\": %" PRIu64
           ", \"given_up\": %" PRIu64 ", \"stopped\": %" PRIu64 ", \"late\": %" PRIu64
           ", \"unexpected_dropped\": %" PRIu64 "}, ",
           dlcp.packets_sent, dlcp.packets_retransmitted, dlcp.packets_lost, dlcp.packets_spurious,
           dlcp.packets_given_up, dlcp.messages_stopped, dlcp.packets_late, dlcp.packets_unexpected_dropped);
    printf("\"dctcp\": {\"segments\": %" PRIu64 ", \"again\": %" PRIu64 ", \"timeouts\": %" PRIu64
           ", \"cuts\": %" PRIu64 "}, ",
           dctcp->segments, dctcp->again, dctcp->timeouts, dctcp->cuts);
    printf("\"events\": %" PRIu64 ", \"virtual_ms\": %.3f}\n", run->clock.events, (double)run->clock.now_ns / 1e6);
}

int main(int count, char **arguments)
{
    static struct run run; /* 144 hosts, 100 Gbit/s, full bisection */
    run.options = (struct options){.transport = "dlcp",
                                   .seed = 1,
                                   .rounds = 1,
                                   .mtu = 4096,
                                   .paths = 1,
                                   .tick_ns = 20,
                                   .sprays = 1,
                                   .priorities = 1,
                                   .selective = 1,
                                   .leaves = 9,
                                   .hosts_per_leaf = 16,
                                   .others_per_leaf = 16,
                                   .spines = 4,
                                   .host_gbps = 100,
                                   .spine_gbps = 400,
                                   .delay_us = 1,
                                   .port_kib = 1024,
                                   .mark_us = 16,
                                   .rto_us = 1000,
                                   .skew_us = 20,
                                   .limit_ms = 2000};
    parse(&run.options, count, arguments);
    begin(&run);
    bool ended = true;
    for (uint32_t round = 0; round < run.round_count && ended; round++)
        ended = run_round(&run, round);
    if (!ended)
        fprintf(stderr, "fabric: not over after %.1f ms of virtual time\n", (double)run.clock.now_ns / 1e6);
    else
        print(&run);
    for (uint32_t i = 0; i < run.round_count * run.shape_count; i++)
        if (run.jobs[i].ranks != NULL)
            sim_job_free(&run.jobs[i]);
    free(run.jobs);
    sim_background_free(&run.background);
    sim_dctcp_free(&run.dctcp);
    sim_dlcp_free(&run.dlcp);
    sim_fabric_free(&run.fabric);
    sim_plans_close(&run.plans);
    sim_clock_free(&run.clock);
    return ended ? 0 : 1;
}
