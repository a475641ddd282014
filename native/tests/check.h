/*
 * Check: the C test framework. A failed check prints its place and lets the test go on. The counter is atomic, so
 * checks may run on any thread. A test program has the main of main.c, or a main of its own that calls check_run.
 */
#pragma once

#include <stdatomic.h>
#include <stdio.h>

extern atomic_int check_failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            atomic_fetch_add(&check_failures, 1);                                                                      \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);                                   \
        }                                                                                                              \
    } while (0)

/* Compares integers, and prints both values. */
#define CHECK_EQ(left, right)                                                                                          \
    do {                                                                                                               \
        long long check_left = (long long)(left), check_right = (long long)(right);                                    \
        if (check_left != check_right) {                                                                               \
            atomic_fetch_add(&check_failures, 1);                                                                      \
            fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left, check_left, #right,          \
                    check_right);                                                                                      \
        }                                                                                                              \
    } while (0)

/* A variable that `leave(&variable)` frees at the end of its block. Later variables go first. */
#define SCOPED(leave) __attribute__((cleanup(leave)))

struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
};

/* Defines a test. check_run runs the tests of a program in the order of their definitions. */
#define TEST(name)                                                                                                     \
    static void name(void);                                                                                            \
    __attribute__((constructor)) static void name##_enters(void)                                                       \
    {                                                                                                                  \
        static struct check_test test = {#name, name, NULL};                                                           \
        check_add(&test);                                                                                              \
    }                                                                                                                  \
    static void name(void)

void check_add(struct check_test *test);
/* Runs all tests; returns the exit status: 0 when there are tests and every check held, else 1. */
int check_run(void);
