#include "sim/summary.h"

#include <inttypes.h>

static void note_cost(struct sim_summary *summary, struct sim_cost cost)
{
    for (int i = 0; i < SIM_SLOWEST; i++) {
        if (cost.events > summary->slowest[i].events) {
            struct sim_cost lower = summary->slowest[i];
            summary->slowest[i] = cost;
            cost = lower;
        }
    }
}

static void add_counts(struct sim_summary *summary, const struct sim_world_counts *counts,
                       const struct sim_medium_counts *network)
{
    struct sim_world_counts *all = &summary->counts;
    all->operations_ok += counts->operations_ok;
    all->messages_ok += counts->messages_ok;
    all->operations_failed += counts->operations_failed;
    all->attacks += counts->attacks;
    all->turns += counts->turns;
    all->lost_bytes += counts->lost_bytes;
    all->openings += counts->openings;
    all->closings += counts->closings;
    all->revivals += counts->revivals;
    all->failed_allocations += counts->failed_allocations;
    all->lossy += counts->lossy;
    all->nan += counts->nan;
    all->any_source += counts->any_source;
    all->many_groups += counts->many_groups;
    all->many_calls += counts->many_calls;
    for (int i = 0; i < SIM_FAULTS; i++)
        all->faults[i] += counts->faults[i];
    if (counts->most_unexpected_bytes > all->most_unexpected_bytes)
        all->most_unexpected_bytes = counts->most_unexpected_bytes;
    if (counts->most_flight_bytes > all->most_flight_bytes)
        all->most_flight_bytes = counts->most_flight_bytes;
    summary->network.sent += network->sent;
    summary->network.delivered += network->delivered;
    summary->network.duplicated += network->duplicated;
    summary->network.reordered += network->reordered;
    summary->network.corrupted += network->corrupted;
    for (int i = 0; i < SIM_LOSSES; i++)
        summary->network.lost[i] += network->lost[i];
}

void sim_summary_add(struct sim_summary *summary, const struct sim_world *world)
{
    summary->seeds++;
    summary->failures += world->failure[0] != 0;
    summary->events += world->clock.events;
    summary->stories[world->scenario->story]++;
    summary->virtual_us += sim_world_now_ns(world) / 1000;
    add_counts(summary, &world->counts, &world->network.medium.counts);
    note_cost(summary, (struct sim_cost){world->scenario->seed, world->clock.events});
}

void sim_summary_merge(struct sim_summary *summary, const struct sim_summary *other)
{
    summary->seeds += other->seeds;
    summary->failures += other->failures;
    summary->events += other->events;
    summary->virtual_us += other->virtual_us;
    for (int i = 0; i < SIM_STORIES; i++)
        summary->stories[i] += other->stories[i];
    add_counts(summary, &other->counts, &other->network);
    for (int i = 0; i < SIM_SLOWEST; i++)
        note_cost(summary, other->slowest[i]);
}

void sim_summary_print(const struct sim_summary *summary, FILE *file)
{
    const struct sim_world_counts *counts = &summary->counts;
    const struct sim_medium_counts *network = &summary->network;
    fprintf(file, "%" PRIu64 " seeds, %" PRIu64 " failed; %.1f virtual hours, %" PRIu64 " events\n", summary->seeds,
            summary->failures, (double)summary->virtual_us / 3.6e9, summary->events);
    fprintf(file, "stories:   ");
    for (int i = 0; i < SIM_STORIES; i++)
        fprintf(file, " %s %" PRIu64, sim_story_name((enum sim_story)i), summary->stories[i]);
    fprintf(file,
            "\noperations: %" PRIu64 " right, %" PRIu64 " of them messages received; %" PRIu64 " with a typed error\n",
            counts->operations_ok, counts->messages_ok, counts->operations_failed);
    fprintf(file,
            "packets:    %" PRIu64 " sent, %" PRIu64 " received, %" PRIu64 " duplicated, %" PRIu64
            " reordered, %" PRIu64 " with flipped bits\n",
            network->sent, network->delivered, network->duplicated, network->reordered, network->corrupted);
    fprintf(file, "lost:      ");
    for (int i = 0; i < SIM_LOSSES; i++)
        fprintf(file, " %s %" PRIu64, sim_loss_name((enum sim_loss)i), network->lost[i]);
    fprintf(file, "\nfaults:    ");
    for (int i = 0; i < SIM_FAULTS; i++)
        fprintf(file, " %s %" PRIu64, sim_fault_name((enum sim_fault_kind)i), counts->faults[i]);
    fprintf(file,
            "; %" PRIu64 " attack packets\nmost memory: %" PRIu64 " bytes of unexpected packets, %" PRIu64
            " in flight on a path\nlost within loss bounds: %" PRIu64 " bytes\n",
            counts->attacks, counts->most_unexpected_bytes, counts->most_flight_bytes, counts->lost_bytes);
    fprintf(file,
            "rare:       groups opened %" PRIu64 " and closed %" PRIu64 " in mid-run, peers met again %" PRIu64
            ", allocations failed %" PRIu64 ", results of 8 or 4 bits %" PRIu64 ", with NaN %" PRIu64
            "; worlds with any source and fatal faults %" PRIu64 ", with 100 groups %" PRIu64
            ", with 20,000 calls %" PRIu64 "\nslowest seeds (events):",
            counts->openings, counts->closings, counts->revivals, counts->failed_allocations, counts->lossy,
            counts->nan, counts->any_source, counts->many_groups, counts->many_calls);
    for (int i = 0; i < SIM_SLOWEST && summary->slowest[i].events > 0; i++)
        fprintf(file, " %" PRIu64 " (%" PRIu64 ")", summary->slowest[i].seed, summary->slowest[i].events);
    fputc('\n', file);
}
