#include "engine/peers.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/check.h"

/* The number of a process that has ended. */
static pid_t end_child(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, NULL, 0) == child);
    return child;
}

/* A job that replaces its dead meets more processes than there are places. */
TEST(test_the_dead_make_room)
{
    struct cl_peers peers = {0};
    pid_t dead = end_child();
    CHECK_EQ(cl_peers_watch(&peers, 0, getpid()), CL_OK);
    for (uint16_t peer = 1; peer < CL_WATCHED_MAX; peer++)
        CHECK_EQ(cl_peers_watch(&peers, peer, dead), CL_OK);
    CHECK(!peers.watched[0].died && peers.watched[1].died);
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, dead), CL_ENOMEM); /* the groups know of no death yet */
    peers.watched[5].died = false;                                     /* now they do */
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, getpid()), CL_OK);
    CHECK_EQ(peers.watched[5].peer, CL_WATCHED_MAX);
    CHECK(!peers.watched[5].died && peers.watched[5].pidfd >= 0);
    CHECK_EQ(peers.watched[0].peer, 0);
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX, getpid()), CL_OK); /* it is watched already */
    CHECK_EQ(cl_peers_watch(&peers, CL_WATCHED_MAX + 1, getpid()), CL_ENOMEM);
    cl_peers_free(&peers);
}
