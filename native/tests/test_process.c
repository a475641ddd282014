#include "os/process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/check.h"

/* Starts a child with a difficult name; it has the name when this returns. */
static pid_t make_child(void)
{
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_NAME, "a) T (b) R");
        (void)!write(ready[1], "", 1);
        for (;;)
            pause();
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

TEST(test_a_stopped_process_is_told_from_a_running_one)
{
    pid_t child = make_child();
    int status;
    CHECK(!cl_process_is_stopped(child));
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK(cl_process_is_stopped(child));
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, WCONTINUED) == child && WIFCONTINUED(status));
    CHECK(!cl_process_is_stopped(child));
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
}

TEST(test_a_process_that_is_not_there_is_not_stopped)
{
    CHECK(!cl_process_is_stopped(0));
    CHECK(!cl_process_is_stopped(INT32_MAX));
}
