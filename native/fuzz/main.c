/*
 * The fuzzer that needs only a compiler: random conversations, all determined by one seed.
 *
 *   receive PACKETS SEED WORKERS   until PACKETS were given to endpoints, by WORKERS processes
 *   receive --run 0xNUMBER         one conversation again, as a finding names it
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fuzz/command.h"
#include "sim/random.h"

enum { INPUT_MIN = 200, INPUT_MAX = 6000, WORKERS_MAX = 64 };

/* The parent shares this, and reads it even after the worker has died. */
struct worker {
    uint64_t run;
    struct conversation_counters counters;
};

static void run(uint64_t number)
{
    static uint8_t input[INPUT_MAX];
    struct sim_random random = {number};
    size_t length = INPUT_MIN + sim_random_next(&random) % (INPUT_MAX - INPUT_MIN);
    /* In half of the conversations no byte commands an insider or an end of anything: otherwise few would be without.
     */
    bool honest = sim_random_next(&random) % 2;
    for (size_t i = 0; i < length; i++) {
        input[i] = (uint8_t)(sim_random_next(&random) >> 32);
        uint32_t command = input[i] % 16;
        if (honest && (command == 7 || command == 8 || input[i] == 25))
            input[i] = (uint8_t)(input[i] + 2);
    }
    command_run(input, length);
}

static void work(struct worker *worker, uint64_t packets, uint64_t seed)
{
    struct sim_random random = {seed};
    while (conversation_counters.packets < packets) {
        worker->run = sim_random_next(&random);
        run(worker->run);
        worker->counters = conversation_counters;
    }
}

static void print(const struct conversation_counters *c, double seconds)
{
#define SHOW(name) printf("  %-18s %" PRIu64 "\n", #name, c->name)
    printf("%" PRIu64 " packets in %" PRIu64 " conversations, %.0f s\n", c->packets, c->conversations, seconds);
    SHOW(genuine);
    SHOW(rejected);
    SHOW(insider);
    printf("of the endpoints:\n");
    SHOW(received);
    SHOW(foreign);
    SHOW(forged);
    SHOW(replayed);
    SHOW(unexpected);
    SHOW(refused);
    SHOW(duplicate);
    SHOW(retransmitted);
    SHOW(lost);
    SHOW(acks);
    SHOW(probes);
    SHOW(messages_done);
    SHOW(messages_stopped);
    SHOW(messages_failed);
    SHOW(messages_cancelled);
    SHOW(peers_lost);
    SHOW(aborts);
#undef SHOW
}

int main(int count, char **arguments)
{
    if (count == 3 && strcmp(arguments[1], "--run") == 0) {
        run(strtoull(arguments[2], NULL, 0));
        print(&conversation_counters, 0);
        return 0;
    }
    uint64_t packets = count > 1 ? strtoull(arguments[1], NULL, 0) : 0,
             seed = count > 2 ? strtoull(arguments[2], NULL, 0) : 0;
    int workers = count > 3 ? atoi(arguments[3]) : 1;
    if (count != 4 || !packets || workers < 1 || workers > WORKERS_MAX) {
        fprintf(stderr, "usage: %s PACKETS SEED WORKERS (1 to %d), or %s --run NUMBER\n", arguments[0], WORKERS_MAX,
                arguments[0]);
        return 2;
    }
    struct worker *shared =
        mmap(NULL, WORKERS_MAX * sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        return 2;
    }
    struct timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    pid_t pids[WORKERS_MAX];
    struct sim_random random = {seed};
    for (int i = 0; i < workers; i++) {
        uint64_t own = sim_random_next(&random);
        pids[i] = fork();
        if (pids[i] == 0) {
            work(&shared[i], packets / (uint64_t)workers + 1, own);
            exit(0);
        }
    }
    int findings = 0;
    struct conversation_counters all = {0};
    for (int i = 0; i < workers; i++) {
        int status = 0;
        if (pids[i] < 0 || waitpid(pids[i], &status, 0) < 0 || status != 0) {
            findings++;
            printf("FINDING: see above; again: %s --run 0x%" PRIx64 "\n", arguments[0], shared[i].run);
        }
        const uint64_t *from = (const uint64_t *)&shared[i].counters;
        for (size_t k = 0; k < sizeof(all) / sizeof(uint64_t); k++)
            ((uint64_t *)&all)[k] += from[k];
    }
    clock_gettime(CLOCK_MONOTONIC, &stop);
    print(&all, (double)(stop.tv_sec - start.tv_sec));
    printf("%d findings\n", findings);
    return findings ? 1 : 0;
}
