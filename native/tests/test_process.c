#include "os/process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
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
    CHECK_EQ(cl_process_state(child), CL_PROCESS_RUNS);
    kill(child, SIGSTOP);
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    CHECK_EQ(cl_process_state(child), CL_PROCESS_STOPPED);
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, WCONTINUED) == child && WIFCONTINUED(status));
    CHECK_EQ(cl_process_state(child), CL_PROCESS_RUNS);
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
}

/* A tracer keeps the child between the signal and its end, as the kernel does while it frees much memory. */
TEST(test_a_process_that_dies_is_told_from_one_that_a_debugger_holds)
{
    pid_t child = make_child();
    int status;
    CHECK(ptrace(PTRACE_SEIZE, child, NULL, PTRACE_O_TRACEEXIT) == 0);
    CHECK(ptrace(PTRACE_INTERRUPT, child, NULL, NULL) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
    CHECK_EQ(cl_process_state(child), CL_PROCESS_RUNS);
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child && status >> 8 == (SIGTRAP | PTRACE_EVENT_EXIT << 8));
    CHECK_EQ(cl_process_state(child), CL_PROCESS_DIES);
    CHECK(ptrace(PTRACE_DETACH, child, NULL, NULL) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

TEST(test_a_process_that_is_not_there_is_not_stopped)
{
    CHECK_EQ(cl_process_state(0), CL_PROCESS_RUNS);
    CHECK_EQ(cl_process_state(INT32_MAX), CL_PROCESS_RUNS);
}
