/* A turn: the order of its work. */
#include "group/turn.h"

#include <string.h>

#include "tests/check.h"

enum { NOW_US = 1000 };

/* Notes what a turn does, a letter for each. */
static struct log {
    char done[16];
    bool more;
    struct cl_news news;
    struct cl_news_item item;
} record;

static void note(char letter)
{
    record.done[strlen(record.done)] = letter;
}

static uint64_t now_us(void *context)
{
    (void)context;
    return NOW_US;
}

static void tell(struct cl_news_item *item)
{
    (void)item;
    note('n');
}

/* An operation ends in the turn. */
static void take(void *context)
{
    (void)context;
    note('t');
    record.item.tell = tell;
    cl_news_add(&record.news, &record.item);
}

static void receive(void *context)
{
    (void)context;
    note('r');
}

static void report_deaths(void *context)
{
    (void)context;
    note('d');
}

static void expired(void *context)
{
    (void)context;
    note('e');
}

static void aborted(void *context, const struct cl_closed_group *group)
{
    (void)context, (void)group;
    note('a');
}

static bool send_packets(void *context)
{
    (void)context;
    note('s');
    return record.more;
}

static const struct cl_turn_io IO = {.now_us = now_us,
                                     .take = take,
                                     .receive = receive,
                                     .report_deaths = report_deaths,
                                     .send = send_packets,
                                     .expired = expired,
                                     .aborted = aborted};

TEST(test_callers_learn_of_an_end_after_the_packets_have_left)
{
    struct cl_endpoint_config config = {.datagram_bytes = 1472, .peer_timeout_us = 1000000};
    struct cl_endpoint *endpoint;
    struct cl_groups groups = {0};
    CHECK_EQ(cl_endpoint_create(&config, &endpoint), CL_OK);
    struct cl_turn turn = {&IO, NULL, endpoint, &groups, &record.news};
    record = (struct log){0};
    cl_endpoint_fail_group(endpoint, 1, CL_EABORTED, UINT16_MAX);
    CHECK_EQ(cl_turn_take(&turn), UINT64_MAX);
    CHECK(strcmp(record.done, "trdasn") == 0);
    record = (struct log){0};
    CHECK_EQ(cl_turn_take(&turn), UINT64_MAX);
    CHECK(strcmp(record.done, "trdsn") == 0);
    record = (struct log){.more = true};
    CHECK_EQ(cl_turn_take(&turn), 0);
    cl_endpoint_destroy(endpoint);
}

TEST(test_without_a_network)
{
    struct cl_groups groups = {0};
    struct cl_turn turn = {&IO, NULL, NULL, &groups, &record.news};
    record = (struct log){0};
    CHECK_EQ(cl_turn_take(&turn), UINT64_MAX);
    CHECK(strcmp(record.done, "trdn") == 0);
}
