/* The main function of a program of tests that has none of its own. */
#include "tests/check.h"

int main(void)
{
    return check_run();
}
