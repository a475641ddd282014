/* Rings: one thread or process writes, another one reads. */
#include "group/ring.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim/random.h"
#include "tests/check.h"

enum { BYTES = 4096, MEMORY = CL_RING_HEAD_BYTES + BYTES, ENTRIES = 200000, PAYLOAD_MOST = BYTES / 4 };

/* Memory that a child process shares. */
static void *shared_memory(void)
{
    void *memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void open_ends(void *memory, struct cl_ring *writer, struct cl_ring *reader)
{
    cl_ring_open(writer, memory, BYTES);
    cl_ring_open(reader, memory, BYTES);
}

static void unmap(void **memory)
{
    munmap(*memory, MEMORY);
}

#define SCOPED_MEMORY SCOPED(unmap) void

static uint64_t length_of(uint64_t number)
{
    return sim_mix(number) % (PAYLOAD_MOST + 1);
}

static bool write_number(struct cl_ring *ring, uint64_t number)
{
    uint8_t payload[PAYLOAD_MOST];
    memset(payload, (int)(number * 37 + 1), length_of(number));
    struct cl_ring_entry entry = {.kind = CL_RING_EAGER, .length = length_of(number), .number = number};
    return cl_ring_write(ring, &entry, payload, entry.length);
}

/* False: there is nothing to read. */
static bool read_number(struct cl_ring *ring, uint64_t number)
{
    struct cl_ring_entry entry;
    uint8_t payload[PAYLOAD_MOST];
    uint32_t wrong = 0;
    if (!cl_ring_next(ring, &entry))
        return false;
    CHECK_EQ(entry.number, number);
    CHECK_EQ(entry.length, length_of(number));
    CHECK(cl_ring_copy(ring, payload, entry.length));
    for (uint64_t i = 0; i < entry.length; i++)
        wrong += payload[i] != (uint8_t)(number * 37 + 1);
    CHECK_EQ(wrong, 0);
    cl_ring_drop(ring, entry.length);
    return true;
}

TEST(test_order_wrap_and_bound)
{
    SCOPED_MEMORY *memory = shared_memory();
    struct cl_ring writer, reader;
    open_ends(memory, &writer, &reader);
    uint64_t written = 0, read = 0;
    struct sim_random random = sim_random_seeded(1, 0);
    while (read < 5000) {
        for (uint64_t count = sim_random_below(&random, 8); count > 0 && write_number(&writer, written); count--)
            written++;
        for (uint64_t count = sim_random_below(&random, 8); count > 0 && read_number(&reader, read); count--)
            read++;
        CHECK(cl_ring_room(&writer) <= BYTES);
    }
    while (read_number(&reader, read))
        read++;
    CHECK_EQ(read, written);
    CHECK(cl_ring_is_empty(&reader));
    CHECK_EQ(cl_ring_room(&writer), BYTES);
}

TEST(test_an_entry_larger_than_the_rest_waits_for_room)
{
    SCOPED_MEMORY *memory = shared_memory();
    struct cl_ring writer, reader;
    open_ends(memory, &writer, &reader);
    static uint8_t payload[BYTES];
    struct cl_ring_entry entry = {.kind = CL_RING_EAGER, .length = BYTES / 2}, got;
    CHECK(cl_ring_write(&writer, &entry, payload, entry.length));
    CHECK(!cl_ring_write(&writer, &entry, payload, entry.length));
    CHECK(!cl_ring_answer(&reader)); /* nobody asked */
    CHECK(!cl_ring_ask(&writer, cl_ring_cost(entry.length)));
    CHECK(cl_ring_next(&reader, &got));
    cl_ring_drop(&reader, got.length);
    CHECK(cl_ring_answer(&reader));
    CHECK(!cl_ring_answer(&reader)); /* once */
    CHECK(cl_ring_ask(&writer, cl_ring_cost(entry.length)));
    CHECK(cl_ring_write(&writer, &entry, payload, entry.length));
}

/* A head that promises more than was written must not be believed. */
TEST(test_a_wrong_length_is_refused)
{
    SCOPED_MEMORY *memory = shared_memory();
    struct cl_ring writer, reader;
    open_ends(memory, &writer, &reader);
    struct cl_ring_entry entry = {.kind = CL_RING_EAGER, .length = 1000}, got;
    uint8_t payload[1000];
    CHECK(cl_ring_write(&writer, &entry, payload, 100));
    CHECK(cl_ring_next(&reader, &got));
    CHECK(!cl_ring_copy(&reader, payload, got.length));
    CHECK(!cl_ring_copy(&reader, payload, UINT64_MAX));
    CHECK(cl_ring_copy(&reader, payload, 100));
}

static void *write_all(void *argument)
{
    struct cl_ring ring;
    cl_ring_open(&ring, argument, BYTES);
    for (uint64_t number = 0; number < ENTRIES; number++)
        while (!write_number(&ring, number))
            sched_yield();
    return NULL;
}

TEST(test_two_threads)
{
    SCOPED_MEMORY *memory = shared_memory();
    struct cl_ring ring;
    pthread_t writer;
    cl_ring_open(&ring, memory, BYTES);
    pthread_create(&writer, NULL, write_all, memory);
    for (uint64_t number = 0; number < ENTRIES;)
        if (read_number(&ring, number))
            number++;
        else
            sched_yield();
    pthread_join(writer, NULL);
    CHECK(cl_ring_is_empty(&ring));
}

/* A process is killed at a random moment, mostly while it writes an entry: what the reader then finds is a sequence of
 * whole entries. */
TEST(test_no_torn_entry_of_a_killed_writer)
{
    for (uint32_t round = 0; round < 40; round++) {
        SCOPED_MEMORY *memory = shared_memory();
        struct cl_ring ring;
        cl_ring_open(&ring, memory, BYTES);
        pid_t writer = fork();
        if (writer == 0) {
            write_all(memory);
            _exit(0);
        }
        uint64_t number = 0;
        while (number < 100 + 37 * round)
            number += read_number(&ring, number);
        kill(writer, SIGKILL);
        CHECK_EQ(waitpid(writer, NULL, 0), writer);
        while (read_number(&ring, number))
            number++;
        CHECK(cl_ring_is_empty(&ring));
    }
}
