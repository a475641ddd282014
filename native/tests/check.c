#include "tests/check.h"

atomic_int check_failures;
static struct check_test *first, **end = &first;

void check_add(struct check_test *test)
{
    *end = test;
    end = &test->next;
}

int check_run(void)
{
    for (const struct check_test *test = first; test != NULL; test = test->next) {
        int before = atomic_load(&check_failures);
        test->run();
        printf("%s %s\n", atomic_load(&check_failures) == before ? "ok" : "FAILED", test->name);
        fflush(stdout);
    }
    return first != NULL && atomic_load(&check_failures) == 0 ? 0 : 1;
}
