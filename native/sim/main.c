/*
 * Runs seeds: `simulate --plans FILE [--first N] [--seeds N] [--jobs N] [--failures N]`, or one seed with its trace:
 * `simulate --plans FILE --seed N`. A job ends after --failures failures (10). --rate-control NAME: instead of the
 * product's (congestion/congestion.h). Exits with 1 when an invariant broke, and prints each such seed with its first
 * broken invariant, and with the text of --commit: another commit may make another world of the seed.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "congestion/congestion.h"
#include "sim/report.h"
#include "sim/run.h"
#include "sim/seed.h"
#include "sim/summary.h"

enum {
    JOBS_MAX = 64,
    CPU_SECONDS = 60 /* for one seed: far more than any seed needs */,
    AGAIN_EVERY = 64 /* each such seed runs twice and must do the same */
};

struct arguments {
    const char *plans, *commit, *rate_control;
    uint64_t first, seeds, seed;
    uint32_t jobs, failures;
    bool trace;
};

/* Limits of the cost of one fault on a clean network. */
static void check_cost(struct sim_world *world, const struct sim_world *calm)
{
    const struct sim_scenario *scenario = world->scenario;
    bool path = scenario->story == SIM_STORY_PATH;
    double left = path ? 1.0 - 1.0 / scenario->paths : 1; /* share of the rate left without one path */
    double work_ns = (double)calm->ended_ns * 1.3 / left;
    double late_ns = path ? 0 : (double)scenario->faults[0].for_ns;
    /* Each pair of ranks notices for itself that a path is dead, within the documented 200 ms. In a chain of operations
     * two pairs may have to notice, one after the other. */
    double cost_ns = path ? 4e8 : 1e8;
    if ((double)world->ended_ns > work_ns + late_ns + cost_ns)
        sim_world_fail(world, "one %s costs too much: all takes %.3f s, without it %.3f s",
                       sim_fault_name(scenario->faults[0].kind), (double)world->ended_ns / 1e9,
                       (double)calm->ended_ns / 1e9);
}

/* Virtual time does not notice an endless loop inside the engine. The message for that case is written beforehand. */
static char stuck[160];

static void end_stuck(int number)
{
    (void)number;
    ssize_t written = write(STDOUT_FILENO, stuck, strlen(stuck));
    _exit(written > 0 ? 1 : 2);
}

static void watch(const struct arguments *arguments, uint64_t seed)
{
    struct itimerval limit = {.it_value = {.tv_sec = CPU_SECONDS}};
    snprintf(stuck, sizeof stuck, "FAILED: seed %" PRIu64 " at %.80s: the engine does not return\n", seed,
             arguments->commit);
    signal(SIGPROF, end_stuck);
    setitimer(ITIMER_PROF, &limit, NULL);
}

static void run_seed(struct sim_plans *plans, const struct arguments *arguments, uint64_t seed,
                     struct sim_summary *summary, FILE *trace)
{
    struct sim_scenario scenario;
    struct sim_world world;
    watch(arguments, seed);
    sim_seed_draw(&scenario, plans, seed);
    scenario.rate_control = arguments->rate_control;
    if (trace != NULL)
        sim_report_scenario(&scenario, plans, trace);
    sim_run(&world, &scenario, plans, false, trace);
    bool compared = sim_story_is_compared(scenario.story);
    if (world.failure[0] == 0 && (seed % AGAIN_EVERY == 0 || compared)) {
        struct sim_world other;
        sim_run(&other, &scenario, plans, compared, NULL);
        if (compared)
            check_cost(&world, &other);
        else if (other.trace.fingerprint != world.trace.fingerprint)
            sim_world_fail(&world, "the same seed did something else the second time");
        sim_run_free(&other);
    }
    if (world.failure[0] != 0) {
        printf("FAILED: seed %" PRIu64 " at %s (%s, %u ranks): %s\n", seed, arguments->commit,
               sim_story_name(scenario.story), scenario.world, world.failure);
        fflush(stdout);
    }
    sim_summary_add(summary, &world);
    sim_run_free(&world);
    sim_scenario_free(&scenario);
}

static void run_share(struct sim_plans *plans, const struct arguments *arguments, uint32_t job,
                      struct sim_summary *summary)
{
    for (uint64_t i = job; i < arguments->seeds && summary->failures < arguments->failures; i += arguments->jobs)
        run_seed(plans, arguments, arguments->first + i, summary, NULL);
}

/* Each job is a process of its own and sends its counts through a pipe. */
static void run_jobs(struct sim_plans *plans, const struct arguments *arguments, struct sim_summary *summary)
{
    int pipes[JOBS_MAX][2];
    fflush(stdout);
    for (uint32_t job = 0; job < arguments->jobs; job++) {
        if (pipe(pipes[job]) != 0) {
            perror("simulate: pipe");
            exit(2);
        }
        pid_t child = fork();
        if (child < 0) {
            perror("simulate: fork");
            exit(2);
        }
        if (child == 0) {
            struct sim_summary own = {0};
            run_share(plans, arguments, job, &own);
            ssize_t written = write(pipes[job][1], &own, sizeof own);
            sim_plans_close(plans);
            exit(written == (ssize_t)sizeof own ? 0 : 2);
        }
        close(pipes[job][1]);
    }
    for (uint32_t job = 0; job < arguments->jobs; job++) {
        struct sim_summary part = {0};
        size_t got = 0;
        for (ssize_t more;
             got < sizeof part && (more = read(pipes[job][0], (char *)&part + got, sizeof part - got)) > 0;)
            got += (size_t)more;
        if (got == sizeof part) {
            sim_summary_merge(summary, &part);
        } else {
            printf("FAILED: job %u of %u ended early: see above\n", job, arguments->jobs);
            summary->failures++;
        }
        close(pipes[job][0]);
    }
    while (wait(NULL) > 0) {
    }
}

static bool read_number(const char *text, uint64_t *number)
{
    char *end;
    *number = strtoull(text, &end, 10);
    return *text != 0 && *end == 0;
}

static bool read_arguments(struct arguments *arguments, int count, char **words)
{
    *arguments = (struct arguments){.commit = "an unknown commit", .first = 1, .seeds = 100, .jobs = 1, .failures = 10};
    for (int i = 1; i + 1 < count; i += 2) {
        uint64_t number = 0;
        bool good = read_number(words[i + 1], &number);
        if (strcmp(words[i], "--plans") == 0)
            arguments->plans = words[i + 1];
        else if (strcmp(words[i], "--commit") == 0)
            arguments->commit = words[i + 1];
        else if (strcmp(words[i], "--rate-control") == 0 && cl_congestion_find(words[i + 1]) != NULL)
            arguments->rate_control = words[i + 1];
        else if (good && strcmp(words[i], "--first") == 0)
            arguments->first = number;
        else if (good && strcmp(words[i], "--seeds") == 0)
            arguments->seeds = number;
        else if (good && number >= 1 && number <= JOBS_MAX && strcmp(words[i], "--jobs") == 0)
            arguments->jobs = (uint32_t)number;
        else if (good && number >= 1 && number <= UINT32_MAX && strcmp(words[i], "--failures") == 0)
            arguments->failures = (uint32_t)number;
        else if (good && strcmp(words[i], "--seed") == 0) {
            arguments->seed = number;
            arguments->trace = true;
        } else
            return false;
    }
    return count % 2 == 1 && arguments->plans != NULL;
}

int main(int count, char **words)
{
    struct arguments arguments;
    if (!read_arguments(&arguments, count, words)) {
        fprintf(stderr,
                "usage: %s --plans FILE [--first N] [--seeds N] [--jobs 1..%d] [--failures N]\n       %s --plans FILE "
                "--seed N\n       and, in both: [--rate-control delay|fixed] [--commit TEXT]\n",
                words[0], JOBS_MAX, words[0]);
        return 2;
    }
    struct sim_plans plans;
    const char *problem = sim_plans_open(&plans, arguments.plans);
    if (problem != NULL) {
        fprintf(stderr, "simulate: %s %s\n", arguments.plans, problem);
        return 2;
    }
    struct sim_summary summary = {0};
    if (arguments.trace) {
        run_seed(&plans, &arguments, arguments.seed, &summary, stdout);
    } else if (arguments.jobs > 1) {
        run_jobs(&plans, &arguments, &summary);
    } else {
        run_share(&plans, &arguments, 0, &summary);
    }
    sim_summary_print(&summary, stdout);
    if (summary.failures > 0 && !arguments.trace)
        printf("replay a seed at its commit, with its trace: make sim SEED=N\n");
    sim_plans_close(&plans);
    return summary.failures > 0 ? 1 : 0;
}
