/*
 * Check: the C test framework. A failed check prints its place and lets the test go on; main ends with
 * `return CHECK_REPORT();`. The counter is atomic, so checks may run on any thread.
 */
#ifndef CL_TESTS_CHECK_H
#define CL_TESTS_CHECK_H

#include <stdatomic.h>
#include <stdio.h>

static atomic_int check_failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            atomic_fetch_add(&check_failures, 1);                                                                      \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);                                   \
        }                                                                                                              \
    } while (0)

/* For integers: prints both values. */
#define CHECK_EQ(left, right)                                                                                          \
    do {                                                                                                               \
        long long check_left = (long long)(left), check_right = (long long)(right);                                    \
        if (check_left != check_right) {                                                                               \
            atomic_fetch_add(&check_failures, 1);                                                                      \
            fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left, check_left, #right,          \
                    check_right);                                                                                      \
        }                                                                                                              \
    } while (0)

#define RUN(test_function)                                                                                             \
    do {                                                                                                               \
        int check_before = atomic_load(&check_failures);                                                               \
        test_function();                                                                                               \
        printf("%s %s\n", atomic_load(&check_failures) == check_before ? "ok" : "FAILED", #test_function);             \
        fflush(stdout);                                                                                                \
    } while (0)

/* The exit status: 0 when every check held, else 1. */
#define CHECK_REPORT() (atomic_load(&check_failures) == 0 ? 0 : 1)

#endif
